"""Which of these, for what: what do the families and today's recurrent models of transformers cost at one size?

    python benchmarks/choosing.py                       # every model, a quarter of an hour of one idle core
    python benchmarks/choosing.py --models Longhorn RWKV-4

Models of 27 to 36 million random weights, in what `pip install` brings on a CPU: a training step, a prompt, tokens
written by `generate`, and the bytes of what is kept between two tokens. Each call adds to the results: a model
has the command and commit that measured it. The page, docs/choosing.md, has recall and loss beside them, of smaller
models (`mqar_families`, `mqar_peers`, `families_books`).
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.timing import RESULTS, machine_arguments, provenance, seconds_of, write_results
from benchmarks.timing.models import TOKENS, build, random_rows, training_step

OURS = ("Longhorn", "SPADE", "BST SH", "LMU-ISA", "Llama")  # Mamba's prompts take minutes without its kernels
PEERS = ("Mamba-2", "Qwen3-Next", "OLMo Hybrid", "RecurrentGemma", "RWKV-4", "xLSTM")
WIDTH, DEPTH, VOCABULARY, WINDOW = 512, 8, 4096, 512
TRAINED, READ, WRITTEN = 512, 2048, 32  # tokens
FAR = 65_536  # tokens read, where the cache is said: it grows on a line, or has stopped growing


def peer_fields(name: str) -> tuple[str, dict[str, Any]]:
    """Model type and fields of a peer of 12 width² weights a layer, or of half of that and twice the layers."""
    heads = WIDTH // 64
    keys = {"num_attention_heads": heads, "num_key_value_heads": heads}
    delta = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    delta |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "intermediate_size": 7 * WIDTH // 3}
    delta |= {"layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(DEPTH)]}
    dense = {"num_experts": 0, "mlp_only_layers": list(range(DEPTH)), "head_dim": 64}
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "Mamba-2": ("mamba2", {"num_hidden_layers": 2 * DEPTH, "state_size": 64, "n_groups": 1, "head_dim": 64}),
        "Qwen3-Next": ("qwen3_next", {**keys, **delta, **dense}),
        "OLMo Hybrid": ("olmo_hybrid", {**keys, **delta}),
        "RecurrentGemma": ("recurrent_gemma", {**keys, "lru_width": WIDTH, "head_dim": 64}),
        "RWKV-4": ("rwkv", {"attention_hidden_size": WIDTH, "intermediate_size": 7 * WIDTH // 2}),
        "xLSTM": ("xlstm", {"num_blocks": DEPTH, "num_heads": heads // 2}),
    }
    own["Mamba-2"][1]["num_heads"] = 2 * heads
    own["RecurrentGemma"][1].update(num_key_value_heads=1, intermediate_size=6 * WIDTH, attention_window_size=WINDOW)
    model_type, fields = own[name]
    return model_type, {"num_hidden_layers": DEPTH, "tie_word_embeddings": True} | fields


def model_of(name: str) -> PreTrainedModel:
    if name in OURS:
        return build(name, WIDTH, DEPTH, vocabulary=VOCABULARY, window=WINDOW)
    torch.manual_seed(0)
    model_type, fields = peer_fields(name)
    config = AutoConfig.for_model(model_type, hidden_size=WIDTH, vocab_size=VOCABULARY, **TOKENS, **fields)
    return AutoModelForCausalLM.from_config(config).eval()


def tensors_of(found: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All that can be reached, each once."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict | list | tuple):
        for each in found.values() if isinstance(found, dict) else found:
            yield from tensors_of(each, seen)
    elif hasattr(found, "__dict__") and not isinstance(found, nn.Module | type):
        yield from tensors_of(vars(found), seen)


def kept_bytes(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """What stays after a prompt (1, L): in the cache; RecurrentGemma returns none, and has states in its modules."""
    is_hidden = model.config.model_type == "recurrent_gemma"
    given = {"cache": DynamicCache(config=model.config)} if is_hidden else {}
    with torch.inference_mode():
        output = model(ids, use_cache=True, **given)
    found = [given, *(value for key, value in output.items() if key != "logits")]
    plain = [{k: v for k, v in vars(module).items() if not k.startswith("_")} for module in model.modules()]
    storages = {each.untyped_storage().data_ptr(): each for each in tensors_of([found, plain], set())}
    return sum(each.numel() * each.element_size() for each in storages.values())


def figures_of(name: str, rounds: int) -> dict[str, Any]:
    """Parameters, tokens a second in training and of a prompt, milliseconds a written token, bytes kept at `FAR`."""
    model = model_of(name)

    def median(run: Any) -> float:
        run()
        return statistics.median(seconds_of(run) for _ in range(rounds))

    def write(new: int) -> None:
        model.generate(random_rows(1, 64, VOCABULARY), max_new_tokens=new, min_new_tokens=new, do_sample=False)

    def read() -> None:
        with torch.inference_mode():
            model(random_rows(1, READ, VOCABULARY), use_cache=True, logits_to_keep=1)

    takes_one = "logits_to_keep" in type(model).forward.__code__.co_varnames
    plain_read = lambda: kept_bytes(model, random_rows(1, READ, VOCABULARY))  # noqa: E731
    half, whole = (kept_bytes(model, random_rows(1, length, VOCABULARY)) for length in (READ // 2, READ))
    written = median(lambda: write(1 + WRITTEN)) - median(lambda: write(1))
    prompt = median(read if takes_one else plain_read)
    rows = random_rows(1, TRAINED, VOCABULARY)
    step = median(training_step(model, {"input_ids": rows, "labels": rows}))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_tokens_per_second": round(TRAINED / step, 1),
        "read_tokens_per_second": round(READ / prompt, 1),
        "milliseconds_per_token": round(1000 * written / WRITTEN, 2),
        "kept_bytes": round(whole + (FAR - READ) * (whole - half) / (READ / 2)),
    }


def commits_of(models: dict[str, Any]) -> str:
    return ", ".join(dict.fromkeys(found["commit"] for found in models.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=OURS + PEERS, default=list(OURS + PEERS), metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="one round, and nothing is kept")
    arguments = machine_arguments(parser, threads=1)
    file = RESULTS / "choosing.json"
    done = json.loads(file.read_text(encoding="utf-8"))["models"] if file.is_file() and not arguments.quick else {}
    call = {key: value for key, value in provenance().items() if key in ("command", "commit")}
    for name in arguments.models:
        done[name] = call | figures_of(name, rounds=1 if arguments.quick else 3)
        models = {each: done[each] for each in OURS + PEERS if each in done}
        settings = {"hidden_size": WIDTH, "layers": DEPTH, "window": WINDOW, "far": FAR}
        of_all = {"command": "python benchmarks/choosing.py", "commit": commits_of(models)}
        write_results("choosing", of_all | {"settings": settings, "models": models})
        gc.collect()


if __name__ == "__main__":
    main()
