"""What does a generated token cost on CPU, next to transformers' Mamba and to reading the weights once; what does it
cost to be able to go back (the past that assisted generation records)?

24 layers of width 1024, one row, float32. The limit is the time of the bare matrix products with the same weights.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import paired_seconds, write_results
from torch import nn
from transformers import DynamicCache, MambaConfig, MambaForCausalLM, PreTrainedModel

from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM

VOCABULARY = 32000
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def build(name: str, width: int, depth: int) -> PreTrainedModel:
    shape = {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY, "state_size": 16}
    if name == "longhorn":
        return LonghornForCausalLM(LonghornConfig(**shape, **TOKENS)).eval()
    return MambaForCausalLM(MambaConfig(**shape, **TOKENS, use_mambapy=False)).eval()


def decoder(model: PreTrainedModel, steps: int, record_past: bool = False) -> Callable[[], None]:
    """`steps` tokens, one at a time, after a prompt of 16."""
    mamba = model.config.model_type == "mamba"
    name = "cache_params" if mamba else "past_key_values"
    token = torch.zeros(1, 1, dtype=torch.long)
    cache = DynamicCache(config=model.config)
    if record_past:
        for layer in cache.layers:
            layer.activate_past_recording()
    with torch.inference_mode():
        model(torch.zeros(1, 16, dtype=torch.long), use_cache=True, **{name: cache})

    def run() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                model(token, use_cache=True, **{name: cache})
        if record_past:
            cache.crop(-steps)

    return run


def bare_products(model: PreTrainedModel, steps: int) -> Callable[[], None]:
    """One matrix-vector product with every matrix of the model: what any implementation must do."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {weight.shape[1]: torch.ones(1, 1, weight.shape[1]) for weight in weights}

    def run() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                for weight in weights:
                    F.linear(inputs[weight.shape[1]], weight)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    width, depth = (256, 4) if arguments.quick else (1024, 24)
    steps, rounds = 8, 3 if arguments.quick else 9
    longhorn, mamba = build("longhorn", width, depth), build("mamba", width, depth)
    candidates = {
        "longhorn": decoder(longhorn, steps),
        "longhorn, past recorded and undone": decoder(longhorn, steps, record_past=True),
        "mamba": decoder(mamba, steps),
        "matrix products alone": bare_products(longhorn, steps),
    }
    seconds = {name: value / steps for name, value in paired_seconds(candidates, rounds=rounds).items()}
    ours = seconds["longhorn"]
    figures = {
        "shape": {"hidden_size": width, "num_hidden_layers": depth, "vocab_size": VOCABULARY, "state_size": 16},
        "milliseconds_per_token": {name: round(1000 * value, 2) for name, value in seconds.items()},
        "longhorn_times_as_fast_as_mamba": round(seconds["mamba"] / ours, 2),
        "share_of_the_matrix_product_limit": round(seconds["matrix products alone"] / ours, 3),
        "cost_of_a_recorded_past": round(seconds["longhorn, past recorded and undone"] / ours, 3),
    }
    write_results("decoding", figures)


if __name__ == "__main__":
    main()
