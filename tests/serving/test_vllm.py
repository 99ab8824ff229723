"""The families in vLLM's engine give the text that `generate` gives, however their requests are scheduled.

float32 on a CPU, greedy, random prompts of 1 to 210 tokens. One engine for a family is small on purpose: at most eight
requests and 48 tokens at once, and twelve pages, so that it cuts prompts and preempts requests.
"""

import contextlib
import gc
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="make vllm has an environment with it")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(SETTINGS)

from vllm import LLM, SamplingParams, TokensPrompt  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from tests.tiny_models import build, config_of, own_language_model  # noqa: E402

ROOT = Path(__file__).parents[2]
FAMILIES = ["longhorn", "bst", "spade", "lmu-isa"]
# layers that the trained checkpoints do not have, with random weights
LAYERS: dict[str, tuple[str, dict]] = {
    "longhorn + window attention": (
        "longhorn + window and full attention",
        {"block_types": ["linear_attention", "sliding_attention"], "num_hidden_layers": 2},
    ),
    "bst block-recurrent": ("bst block-recurrent", {}),
    "bst rotary": ("bst rotary", {}),
    "spade adaptive": ("spade adaptive", {}),
}
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "block_size": 16, "num_gpu_blocks_override": 12}
NEW = 24


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The checkpoint of a family, or a tiny model of a kind of layers."""

    def folder_of(checkpoint: str) -> Path:
        if checkpoint in FAMILIES:
            return ROOT / f"checkpoints/{checkpoint}-books"
        folder = tmp_path_factory.mktemp("models")
        variant, fields = LAYERS[checkpoint]
        model = AutoModelForCausalLM.from_config(config_of(variant, **fields)) if fields else build(variant)
        model.save_pretrained(folder, max_shard_size="16KB")
        return folder

    return folder_of


@contextlib.contextmanager
def engine_of(folder: Path, **options):
    """An engine in this process, which can have another one afterwards."""
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "disable_log_stats": False, "seed": 0}
    defaults |= {"skip_tokenizer_init": not (folder / "tokenizer.json").exists(), "enable_prefix_caching": True}
    engine = LLM(str(folder), **defaults | options)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", params=[*FAMILIES, *LAYERS])
def checkpoint(request):
    return request.param


@pytest.fixture(scope="module")
def served(checkpoint, folder_of):
    folder = folder_of(checkpoint)
    with engine_of(folder, **SMALL) as engine:
        yield engine, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts_of(model, lengths, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def generated(model, prompt: list[int], count: int = NEW) -> list[int]:
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def answered(engine, prompts, **options):
    asked = SamplingParams(**{"max_tokens": NEW, "temperature": 0, "ignore_eos": True} | options)
    return engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], asked, use_tqdm=False)


def check_equal(model, prompts, outputs) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == generated(model, prompt), f"a prompt of {len(prompt)} tokens"


def counted(engine, name: str) -> int:
    return sum(metric.value for metric in engine.get_metrics() if metric.name == f"vllm:{name}")


def test_plain(served, checkpoint):
    """Prompts that fit into one forward, alone and eight at once."""
    engine, model = served
    prompts = prompts_of(model, (1, 2, 3, 5, 7, 9, 11, 6), 1)
    check_equal(model, prompts[:2], [*answered(engine, prompts[:1]), *answered(engine, prompts[1:2])])
    check_equal(model, prompts, answered(engine, prompts))


def test_chunked(served, checkpoint):
    """Prompts that are longer than a forward, cut wherever the other requests leave room."""
    engine, model = served
    prompts = prompts_of(model, (100, 61, 150, 1, 49, 210), 2)
    check_equal(model, prompts, answered(engine, prompts))


def test_prefix_caching(served, checkpoint, record_property):
    """The second time, and with more after it, most of a prompt comes from the cache."""
    engine, model = served
    prompts, cached = prompts_of(model, (64, 90), 3), []
    for others in (prompts, prompts, [[*prompt, 5, 9] for prompt in prompts]):
        outputs = answered(engine, others)
        check_equal(model, others, outputs)
        cached += [output.num_cached_tokens for output in outputs]
    record_property("tokens from the cache", cached[2:])
    assert cached[:2] == [0, 0] and min(cached[2:]) >= 16


def test_preemption(served, checkpoint, record_property):
    """Eight requests that all need a second page at once, of twelve: some lose theirs, and are read again."""
    engine, model = served
    before = counted(engine, "num_preemptions")
    prompts = prompts_of(model, (5,) * 8, 4)
    outputs = answered(engine, prompts, max_tokens=60)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == generated(model, prompt, 60)
    record_property("preemptions", counted(engine, "num_preemptions") - before)
    assert counted(engine, "num_preemptions") > before


@torch.no_grad()
def test_log_probabilities(served, checkpoint, record_property):
    """Of the prompt and of the text, as those of one forward."""
    engine, model = served
    prompt = prompts_of(model, (70,), 5)[0]
    (output,) = answered(engine, [prompt], logprobs=2, prompt_logprobs=1)
    tokens = [*prompt, *output.outputs[0].token_ids]
    expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    deviations = [
        abs(of[token].logprob - float(expected[i, token])) for i, (of, token) in enumerate(zip(found, tokens[1:]))
    ]
    record_property("largest deviation", f"{max(deviations):.1e}")
    assert len(deviations) == len(tokens) - 1 and max(deviations) < 1e-4


def test_what_the_engine_does_with_answers(folder_of):
    """n > 1, stop strings, and requests that are aborted half way: the others do not change."""
    folder = folder_of("spade")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with engine_of(folder, **SMALL) as engine:
        prompt, *others = prompts_of(model, (30, 20, 50), 6)
        # without a seed of its own: vLLM 0.29 fails on one on a CPU where a prompt is read in pieces
        (drawn,) = answered(engine, [prompt], n=3, temperature=1.0)
        assert len({answer.text for answer in drawn.outputs}) == 3
        (whole,) = answered(engine, [prompt])
        stop = whole.outputs[0].text[6:9]
        (cut,) = answered(engine, [prompt], stop=[stop])
        text = whole.outputs[0].text
        assert cut.outputs[0].text == text[: text.index(stop)] and cut.outputs[0].finish_reason == "stop"
        names = [str(number) for number in range(2)]
        for name, other in zip(names, others):
            asked = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
            engine.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=other), asked)
        finished = []
        for step in itertools.count():
            if step == 4:
                engine.llm_engine.abort_request([names[0]])
            finished += [output for output in engine.llm_engine.step() if output.finished]
            if not engine.llm_engine.has_unfinished_requests():
                break
        finished = [output for output in finished if output.outputs[0].finish_reason != "abort"]
        check_equal(model, others[1:], finished)


@torch.no_grad()
@pytest.mark.parametrize("checkpoint", ["longhorn", "bst block-recurrent"])
def test_bfloat16(checkpoint, folder_of, record_property):
    """Log-probabilities are as near to float32's as those of transformers in bfloat16; states stay in float32."""
    folder = folder_of(checkpoint)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    prompts = prompts_of(exact, (90, 30), 8)
    with engine_of(folder, **SMALL, dtype="bfloat16") as engine:
        outputs = answered(engine, prompts, prompt_logprobs=0)
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs):
        expected, usual = (m(torch.tensor([prompt])).logits[0].float().log_softmax(-1) for m in (exact, rounded))
        for i, (of, token) in enumerate(zip(output.prompt_logprobs[1:], prompt[1:])):
            ours.append(of[token].logprob - float(expected[i, token]))
            theirs.append(float(usual[i, token] - expected[i, token]))
    ours, theirs = (torch.tensor(values).square().mean().sqrt().item() for values in (ours, theirs))
    record_property("root mean square", f"{ours:.4f}")
    record_property("of transformers", f"{theirs:.4f}")
    assert 0 < ours < 2 * theirs


# -- refused, before anything is loaded -------------------------------------------------------------------------------


def configured(folder, **options):
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "skip_tokenizer_init": True}
    return EngineArgs(model=str(folder), **defaults | options).create_engine_config()


REFUSED = {
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not possible"),
    "tensor parallelism": ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not possible"),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative_config='ngram' is not possible",
    ),
    "LoRA": ({"enable_lora": True}, "enable_lora=True is not possible"),
    "quantization": ({"quantization": "fp8"}, "quantization='fp8' is not possible"),
    "prompt embeddings": ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True is not possible"),
    "states of all blocks": (
        {"enable_prefix_caching": True, "mamba_cache_mode": "all"},
        "mamba_cache_mode='all' is not possible",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_refused(name):
    """Of vLLM, by name and with their value."""
    options, words = REFUSED[name]
    with pytest.raises(Exception, match=words):
        configured(ROOT / "checkpoints/longhorn-books", **options)


@pytest.mark.parametrize("variant", ["longhorn + full attention", "lmu-isa + global attention", "spade hyena full"])
def test_layers_that_are_refused(variant, tmp_path):
    """Full and global attention: a page of fixed size cannot hold the keys of all tokens."""
    own_language_model(variant).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"layers \[.* keep the keys and values of all tokens"):
        configured(tmp_path)


def test_weights_that_are_refused():
    """A tensor that is missing, foreign, or of another shape; all of them loaded is what transformers loads."""
    from hf_hybrid_ssm.serving.vllm_model import PagedHybridForCausalLM

    folder = ROOT / "checkpoints/longhorn-books"
    config = configured(folder)
    with set_current_vllm_config(config):
        model = PagedHybridForCausalLM(vllm_config=config)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    weights = {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"}
    model.load_weights(weights.items())
    for name, tensor in model.inner.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    first = next(iter(weights))
    with pytest.raises(ValueError, match=f"the checkpoint lacks {first}"):
        model.load_weights(item for item in weights.items() if item[0] != first)
    with pytest.raises(ValueError, match="the checkpoint holds stranger, which LonghornForCausalLM does not have"):
        model.load_weights({**weights, "stranger": torch.zeros(1)}.items())
    with pytest.raises(ValueError, match=rf"{first} has shape \(3,\) in the checkpoint"):
        model.load_weights({first: torch.zeros(3)}.items())


# -- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server_of(folder: Path, log: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "model", "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | SETTINGS)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.parametrize("checkpoint", FAMILIES)
def test_server(checkpoint, folder_of, tmp_path, record_property):
    """`vllm serve` and OpenAI's client: twelve streams at once, and a chat."""
    from openai import OpenAI

    folder, texts, streams = folder_of(checkpoint), {}, 12
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_of(model, [1, 2, 3, 7, 15, 16, 17, 30, 45, 64, 100, 200], 9)
    with server_of(folder, tmp_path / "log.txt") as address:
        client = OpenAI(base_url=address, api_key="none")

        def ask(number: int) -> None:
            options = {"max_tokens": NEW, "temperature": 0, "logprobs": 1, "stream": True}
            parts = client.completions.create(
                model="model",
                prompt=prompts[number],
                **options,
                extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
            )
            found = [token for part in parts for choice in part.choices for token in choice.logprobs.tokens]
            texts[number] = [int(token.removeprefix("token_id:")) for token in found]

        for turn in range(2):  # the first one also warms up
            begun = time.perf_counter()
            threads = [threading.Thread(target=ask, args=(number,)) for number in range(streams)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - begun
            assert [texts[number] for number in range(streams)] == [generated(model, p) for p in prompts], turn
        messages = [{"role": "user", "content": "It was a dark night."}]
        chat = client.chat.completions.create(model="model", messages=messages, max_tokens=8, temperature=0)
        assert chat.usage.completion_tokens in range(1, 9) and chat.choices[0].message.content
        record_property("requests a second", f"{streams / seconds:.2f}")
        record_property("new tokens a second", f"{streams * NEW / seconds:.1f}")


def test_the_folders_are_exported_ones():
    """What is served carries its code, and does not need it."""
    for checkpoint in FAMILIES:
        config = json.loads((ROOT / f"checkpoints/{checkpoint}-books/config.json").read_text(encoding="utf-8"))
        assert config["auto_map"]["AutoModelForCausalLM"]
