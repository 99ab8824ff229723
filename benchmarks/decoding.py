"""What does a generated token cost in each family, next to transformers' Llama and Mamba and to reading the weights
once; what does it cost to be able to go back (the past that assisted generation records)?

One row; float32 on a CPU, bfloat16 on CUDA. The limit is the time of the bare matrix products with the same weights.
"""

import argparse
import gc

import torch
from timing import machine_arguments, paired_seconds, write_results
from timing.models import FAMILIES, bare_products, build, decoder

VOCABULARY = 32000
STEPS = 8
LIMITED = ("Longhorn", "SPADE", "BST SH")


def against_mamba(width: int, depth: int, rounds: int, options: dict) -> dict:
    """Longhorn, with and without a recorded past; `depth` counts its own layers."""
    longhorn, mamba = (build(name, width, depth // 2, **options) for name in ("Longhorn", "Mamba"))
    candidates = {
        "longhorn": decoder(longhorn, STEPS),
        "longhorn, past recorded and undone": decoder(longhorn, STEPS, record_past=True),
        "mamba": decoder(mamba, STEPS),
        "matrix products alone": bare_products(longhorn, STEPS),
    }
    seconds = per_token(candidates, rounds, options["device"])
    ours = seconds["longhorn"]
    return {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY, "state_size": 16},
        "milliseconds_per_token": milliseconds(seconds),
        "share_of_the_matrix_product_limit": round(seconds["matrix products alone"] / ours, 3),
    }


def share_of_the_limit(width: int, depth: int, rounds: int, options: dict) -> dict:
    """One model at a time: the larger ones leave no room for others."""
    figures = {"shape": {"hidden_size": width, "num_hidden_layers": depth}, "milliseconds_per_token": {}, "share": {}}
    for name in LIMITED:
        model = build(name, width, depth // 2 if name == "Longhorn" else depth, **options)
        candidates = {"model": decoder(model, STEPS), "products": bare_products(model, STEPS)}
        seconds = per_token(candidates, rounds, options["device"])
        figures["milliseconds_per_token"][name] = round(1000 * seconds["model"], 2)
        figures["share"][name] = round(seconds["products"] / seconds["model"], 3)
        del model, candidates
        gc.collect()
    return figures


def families(width: int, depth: int, rounds: int, options: dict) -> dict:
    """Every family and Llama in turns; Longhorn has twice the layers, which is the same number of weights."""
    models = {name: build(name, width, depth, **options) for name in ("Llama", *FAMILIES)}
    candidates = {name: decoder(model, STEPS) for name, model in models.items()}
    seconds = per_token(candidates, rounds, options["device"])
    return {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY},
        "milliseconds_per_token": milliseconds(seconds),
        "time_over_llama": {name: round(value / seconds["Llama"], 2) for name, value in seconds.items()},
    }


def per_token(candidates: dict, rounds: int, device: str) -> dict[str, float]:
    return {name: value / STEPS for name, value in paired_seconds(candidates, rounds=rounds, device=device).items()}


def milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1000 * value, 2) for name, value in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    arguments = machine_arguments(parser)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    options = {"vocabulary": VOCABULARY, "device": arguments.device, "dtype": dtype}
    rounds = 3 if arguments.quick else 9
    large, small = ((256, 4), (128, 2)) if arguments.quick else ((1024, 24), (512, 8))
    figures = {
        "dtype": str(dtype).removeprefix("torch."),
        **against_mamba(*large, rounds, options),
        "families": families(*small, rounds, options),
        "weights_limit": share_of_the_limit(*large, rounds, options),
    }
    write_results("decoding", figures, arguments.device)


if __name__ == "__main__":
    main()
