"""How fast is a training step of each family next to one of transformers' Llama of the same size?

Width 512, 8 layers (Longhorn 16), vocabulary 32,000: forward, loss, backward and AdamW on one row. Float32 on a CPU,
bfloat16 autocast on CUDA. BST SH and the sliding attention that it extends are also compared on a longer row. Where a
step of each goes is counted in operations, and in shares of its time by torch's profiler, on a CPU.
"""

import argparse
import gc
from collections.abc import Callable

import torch
from timing import machine_arguments, paired_seconds, write_results
from timing.models import FAMILIES, batch_of, build, random_rows, training_step
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

VOCABULARY = 32000
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # of torch's matrices
ALONG_A_ROW = ("hf_hybrid_ssm::", "GeneratedBackwardFor_hf_hybrid_ssm", "aten::_scaled_dot_product")


def steps_of(names: tuple[str, ...], width: int, depth: int, length: int, device: str) -> dict:
    inputs = batch_of("plain", random_rows(1, length, VOCABULARY, device))
    autocast = torch.bfloat16 if device == "cuda" else None
    models = {name: build(name, width, depth, vocabulary=VOCABULARY, device=device) for name in names}
    return {name: training_step(model, inputs, autocast=autocast) for name, model in models.items()}


def parts_of(step: Callable[[], None]) -> dict[str, float]:
    """Billions of operations of matrix products, and which part of the time goes into these and into what runs along a
    row: attention, scans, convolutions."""
    with FlopCounterMode(display=False) as counter:
        step()
    counts = {operation.__name__: count for operation, count in counter.get_flop_counts()["Global"].items()}
    with profile() as profiled:
        step()
    times = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
    products = sum(times.get(f"aten::{name}", 0.0) for name in PRODUCTS)
    along = sum(value for key, value in times.items() if key.startswith(ALONG_A_ROW))
    whole = sum(times.values())
    return {
        "products_gflop": round(sum(counts.get(name, 0) for name in PRODUCTS) / 1e9, 1),
        "share_of_products": round(products / whole, 3),
        "share_along_rows": round(along / whole, 3),
    }


def against_llama(width: int, depth: int, length: int, rounds: int, device: str) -> dict:
    """Llama takes its turn with every family, one at a time: eight models with their optimizers are too many."""
    figures: dict = {"length": length, "tokens_per_second": {}, "times_as_fast_as_llama": {}, "parts": {}}
    for name in FAMILIES:
        steps = steps_of(("Llama", name), width, depth, length, device)
        seconds = paired_seconds(steps, rounds=rounds, warm_up=1, device=device)
        figures["tokens_per_second"][name] = round(length / seconds[name])
        figures["tokens_per_second"].setdefault("Llama", round(length / seconds["Llama"]))
        if device == "cpu":
            figures["parts"] |= {each: parts_of(step) for each, step in steps.items() if each not in figures["parts"]}
        figures["times_as_fast_as_llama"][name] = round(seconds["Llama"] / seconds[name], 2)
        del steps
        gc.collect()
    return figures


def context_states(width: int, depth: int, length: int, rounds: int, device: str) -> dict:
    seconds = paired_seconds(
        steps_of(("BST sliding", "BST SH"), width, depth, length, device), rounds=rounds, warm_up=1, device=device
    )
    return {
        "length": length,
        "num_hidden_layers": depth,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "sh_time_over_sliding": round(seconds["BST SH"] / seconds["BST sliding"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, short rows, few rounds")
    arguments = machine_arguments(parser)
    quick = arguments.quick
    width, depth, length, rounds = (128, 2, 128, 2) if quick else (512, 8, 1024, 3)
    figures = {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY, "batch": 1},
        "against_llama": against_llama(width, depth, length, rounds, arguments.device),
        "context_states": context_states(width, depth // 2, 4 * length, rounds, arguments.device),
    }
    write_results("training", figures, arguments.device)


if __name__ == "__main__":
    main()
