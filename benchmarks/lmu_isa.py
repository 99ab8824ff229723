"""LMU-ISA: its kernel against its products and the paper's FFT, growth with length, decoding, GPT-2 of equal width.

The row of table 3 with a million parameters beside the embedding; a small vocabulary, so that the head does not hide
the layers, and once with the paper's. Float32. `--forms` writes a table of its own: every form at several orders and
lengths, the rate of the products against the machine's, and decoding against a Llama. With `--device cuda` the kernel,
which runs on the CPU, is left out.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
from timing import exponent, paired_seconds, peak_megabytes_of, write_results
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_hybrid_ssm import LmuIsaConfig, LmuIsaForCausalLM
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import read_out

VOCABULARY = 500
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
DEVICE = "cpu"
KERNEL = "kernel"  # what runs by default on a CPU; the other forms are plain torch


def forms() -> list[str]:
    return [KERNEL, "chunked", "fft"] if DEVICE == "cpu" else ["chunked", "fft"]


def default_form() -> str:
    return forms()[0]


def build(name: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 204, "n_layer": 2, "n_head": 12, "n_positions": 32768, "vocab_size": vocabulary}
        config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS)
        model = GPT2LMHeadModel(config)
    else:
        model = LmuIsaForCausalLM(LmuIsaConfig.preset("1m", vocab_size=vocabulary, **TOKENS))
        for layer in model.model.layers:
            layer.memory.form = "auto" if name == KERNEL else name
    model.config.use_cache = False
    return model.train().to(DEVICE)


def in_torch(name: str):
    """The context in which a form runs."""
    return backend("torch") if name in ("chunked", "fft") else nullcontext()


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def training_step(name: str, batch: int, length: int, vocabulary: int = VOCABULARY) -> Callable[[], None]:
    """Forward, loss, backward on random tokens."""
    model = build(name, vocabulary)
    tokens = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def step() -> None:
        with in_torch(name):
            model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
        wait()

    return step


def against_fft(batch: int, rounds: int) -> dict:
    steps = {name: training_step(name, batch, 1024) for name in forms()}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
    figures = {
        "batch": batch,
        "tokens_per_second": {name: round(batch * 1024 / value) for name, value in seconds.items()},
        "times_as_fast_as_fft": round(seconds["fft"] / seconds[default_form()], 2),
    }
    if DEVICE == "cpu":
        memory = {name: memory_in_own_process(name, batch) for name in steps}
        figures["peak_megabytes"] = {name: round(value, 1) for name, value in memory.items()}
        figures["share_of_the_memory_of_fft"] = round(memory[KERNEL] / memory["fft"], 3)
    return figures


def by_length(lengths: list[int], rounds: int) -> dict:
    figures: dict = {"lmu_isa_seconds": {}, "gpt2_seconds": {}, "lmu_isa_times_as_fast_as_gpt2": {}}
    for length in lengths:
        steps = {"lmu_isa": training_step(default_form(), 1, length), "gpt2": training_step("gpt2", 1, length)}
        seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
        for name, value in seconds.items():
            figures[f"{name}_seconds"][str(length)] = round(value, 4)
        figures["lmu_isa_times_as_fast_as_gpt2"][str(length)] = round(seconds["gpt2"] / seconds["lmu_isa"], 2)
    figures["exponent"] = round(exponent(lengths, list(figures["lmu_isa_seconds"].values())), 3)
    return figures


def with_head(rounds: int) -> dict:
    """The same step with the paper's vocabulary, as the row of the table is trained."""
    steps = {name: training_step(name, 1, 1024, 50257) for name in (default_form(), "gpt2")}
    seconds = paired_seconds(steps, rounds=rounds, warm_up=1)
    return {
        "vocabulary": 50257,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "lmu_isa_times_as_fast_as_gpt2": round(seconds["gpt2"] / seconds[default_form()], 2),
    }


def decoding_step(model: PreTrainedModel, prompt: int) -> Callable[[], None]:
    model.eval()
    token = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    cache = DynamicCache(config=model.config)

    def step(tokens: torch.Tensor = token) -> None:
        with torch.inference_mode():
            model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        wait()

    step(token.expand(1, prompt))
    return step


def decoding(rounds: int) -> dict:
    """Milliseconds per token after prompts of different lengths."""
    candidates = {str(length): decoding_step(build(default_form()), length) for length in (16, 4096)}
    seconds = paired_seconds(candidates, rounds=20 * rounds)
    return {f"after {length} tokens": round(1000 * value, 2) for length, value in seconds.items()}


def decoding_against_llama(rounds: int) -> dict:
    """Width 512, 8 layers, one row: a block of deferred updates and more."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 8, **TOKENS}
    lmu = LmuIsaForCausalLM(LmuIsaConfig(**sizes, post_intermediate_size=1178, attention_scale=512**-0.5))
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, intermediate_size=1376))
    candidates = {"lmu_isa": decoding_step(lmu.to(DEVICE), 64), "llama": decoding_step(llama.to(DEVICE), 64)}
    seconds = paired_seconds(candidates, rounds=40 * rounds)
    figures: dict = {"milliseconds": {name: round(1000 * value, 2) for name, value in seconds.items()}}
    return figures | {"times_the_time_of_llama": round(seconds["lmu_isa"] / seconds["llama"], 2)}


def one_layer(rounds: int, tokens: int, lengths: list[int], presets: list[str]) -> dict:
    """Microseconds a token of implicit attention alone, forward and as a training step, each form in its turn."""
    figures: dict = {}
    for preset in presets:
        config = LmuIsaConfig.preset(preset)
        rows, order, width = config.lmu_reduced_order, config.lmu_order, config.hidden_size
        random = torch.Generator().manual_seed(0)
        shapes = {"weight": (3, rows, order), "bias": (3, rows), "collapse": (rows,), "collapse_bias": (1,)}
        parameters = {name: torch.randn(size, generator=random) / size[-1] ** 0.5 for name, size in shapes.items()}
        for length in lengths:
            x = torch.randn(max(1, tokens // length), length, width, generator=random)
            candidates = {
                f"{name} {part}": _layer_run(name, part, x, parameters, config)
                for part in ("forward", "step")
                for name in (*forms(), "chunked bfloat16")
            }
            seconds = paired_seconds(candidates, rounds=rounds, warm_up=1)
            count = x.shape[0] * length
            figures[f"{preset}: q={order}, q'={rows}, d={width}, L={length}"] = {
                name: round(1e6 * value / count, 2) for name, value in seconds.items()
            }
    return figures


def _layer_run(name: str, part: str, x: torch.Tensor, parameters: dict, config: LmuIsaConfig) -> Callable[[], None]:
    form, *dtype = name.split()
    dtype = torch.bfloat16 if dtype else torch.float32
    x, *leaves = (t.to(DEVICE, dtype).requires_grad_(part == "step") for t in (x, *parameters.values()))
    options = {"theta": config.lmu_theta, "form": "auto" if form == KERNEL else form}

    def run() -> None:
        with in_torch(form):
            y, _ = implicit_attention(x, **dict(zip(parameters, leaves)), **options)
            if part == "step":
                torch.autograd.grad(y.sum(), (x, *leaves))
        wait()

    return run


def matrix_products(rounds: int) -> dict:
    """The rate of what reads the blocks of a row of 1024 tokens, four at a time, against products of the same size."""
    rows, order, width, block, count = 66, 220, 204, 32, 4
    figures: dict = {}
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        sizes = [(block * rows, block), (block * rows, order), (count, block, width), (count, order, width)]
        tensors = [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]
        both, one = torch.cat(tensors[:2], 1), torch.randn(block + order, count * width, device=DEVICE).to(dtype)

        def of_blocks(tensors=tensors) -> None:
            for _ in range(8):
                read_out(*tensors)
            wait()

        def single(both=both, one=one) -> None:
            for _ in range(8):
                torch.mm(both, one)
            wait()

        seconds = paired_seconds({"of blocks": of_blocks, "one product": single}, rounds=5 * rounds)
        operations = 16 * both.numel() * one.shape[1]
        figures[name] = {key: round(operations / value / 1e9, 1) for key, value in seconds.items()}
        figures[name]["share"] = round(seconds["one product"] / seconds["of blocks"], 2)
    return {"gigaflops": figures}


def memory_in_own_process(name: str, batch: int) -> float:
    command = [sys.executable, __file__, "--memory", name, "--batch", str(batch)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small batch, short lengths, few rounds")
    parser.add_argument("--forms", action="store_true", help="the table of forms alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", choices=[KERNEL, "chunked", "fft"], help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=8, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    DEVICE = arguments.device
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        training_step(arguments.memory, 1, 64)()
        print(peak_megabytes_of(training_step(arguments.memory, arguments.batch, 1024)))
        return
    suffix = "" if DEVICE == "cpu" else "_cuda"
    batch, rounds = (2, 2) if arguments.quick else (8, 3)
    if arguments.forms:
        presets = ["55k", "1m"] if arguments.quick else ["55k", "200k", "500k", "1m", "10m-deep"]
        lengths = [64, 1024] if arguments.quick else [16, 64, 256, 1024, 4096]
        figures = {
            "microseconds_per_token": one_layer(rounds, 1024 if arguments.quick else 4096, lengths, presets),
            "matrix_products": matrix_products(rounds),
            "decoding": decoding_against_llama(rounds),
        }
        write_results(f"lmu_isa_forms{suffix}", figures)
        return
    lengths = [512, 1024] if arguments.quick else [1024, 2048, 4096, 8192, 16384]
    figures = {
        "training_step_at_1024": against_fft(batch, rounds),
        "training_step_of_one_row": by_length(lengths, 2 if arguments.quick else 3),
        "training_step_of_one_row_of_1024_with_the_head": with_head(rounds),
        "decoding_milliseconds": decoding(rounds),
    }
    write_results(f"lmu_isa{suffix}", figures)


if __name__ == "__main__":
    main()
