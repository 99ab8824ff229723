"""What does a layer of the Block-State Transformer cost, next to plain window attention and to the
Block-Recurrent layer that it replaces; is it linear; how fast does bst-80m read and write?

The paper's layer-level setting: window 128, state 16, 16 heads, width 512; one row, float32, without the feed-forward
layer, which is the same in all. "forward" is inference, "training" forward and backward.
"""

import argparse
from collections.abc import Callable

import torch
from timing import exponent, machine_arguments, paired_seconds, write_results
from transformers import DynamicCache

from hf_hybrid_ssm import BstConfig, BstForCausalLM
from hf_hybrid_ssm.models.bst.modeling_bst import BstAttention, BstModel

SHAPE = {"hidden_size": 512, "num_attention_heads": 16, "head_dim": 32, "sliding_window": 128, "ssm_state_size": 16}
LAYERS = {
    "SH": {"layer_types": ["bst"], "context_variant": "sh"},
    "MH": {"layer_types": ["bst"], "context_variant": "mh"},
    "MF": {"layer_types": ["bst"], "context_variant": "mf"},
    "sliding attention": {"layer_types": ["window_attention"]},
    "Block-Recurrent": {"layer_types": ["block_recurrent"]},
}


def layer(name: str, device: str) -> BstAttention:
    """The attention sublayer of a model of one layer, with its initial weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "attention_dropout": 0.0}
    config = BstConfig(**SHAPE, **sizes, **LAYERS[name], pad_token_id=0, eos_token_id=None)
    return BstModel(config).layers[0].attention.to(device)


def run_of(module: BstAttention, length: int, backward: bool) -> Callable[[], None]:
    x = torch.randn(1, length, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    x = x.to(next(module.parameters()).device).requires_grad_(backward)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            y, _ = module(x, x, {})
            if backward:
                y.sum().backward()

    return run


def layers(lengths: list[int], rounds: int, device: str) -> dict:
    figures: dict[str, dict] = {}
    modules = {name: layer(name, device) for name in LAYERS}
    for kind, backward in (("forward", False), ("training", True)):
        by_length: dict[str, dict[str, float]] = {}
        for length in lengths:
            if backward and length > 16384:
                continue
            runs = {name: run_of(module, length, backward) for name, module in modules.items()}
            by_length[str(length)] = paired_seconds(runs, rounds=rounds, warm_up=1, device=device)
        shortest = by_length[str(lengths[0])]
        figures[kind] = {
            "thousand_tokens_per_second": {
                length: {name: round(int(length) / value / 1000, 1) for name, value in seconds.items()}
                for length, seconds in by_length.items()
            },
            f"SH_times_as_fast_as_block_recurrent_at_{lengths[0]}": round(
                shortest["Block-Recurrent"] / shortest["SH"], 2
            ),
            f"SH_times_the_time_of_sliding_attention_at_{lengths[0]}": round(
                shortest["SH"] / shortest["sliding attention"], 2
            ),
            f"MF_times_the_time_of_SH_at_{lengths[0]}": round(shortest["MF"] / shortest["SH"], 2),
            "exponent": {
                name: round(exponent([int(n) for n in by_length], [s[name] for s in by_length.values()]), 3)
                for name in LAYERS
            },
        }
    return figures


def language_model(rounds: int, device: str) -> dict:
    """Prefill and decoding of bst-80m, one row."""
    torch.manual_seed(0)
    model = BstForCausalLM(BstConfig.preset("80m")).eval().to(device)
    prompt, token = torch.randint(2, 32000, (1, 2048)).to(device), torch.zeros(1, 1, dtype=torch.long, device=device)
    held = DynamicCache(config=model.config)

    @torch.inference_mode()
    def prefill() -> None:
        model(prompt, cache=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def decode() -> None:
        model(token, cache=held, use_cache=True)

    with torch.inference_mode():
        model(prompt, cache=held, use_cache=True, logits_to_keep=1)
    prefilled = paired_seconds({"prefill": prefill}, rounds=max(2, rounds // 2), warm_up=1, device=device)["prefill"]
    decoded = paired_seconds({"decode": decode}, rounds=5 * rounds, device=device)["decode"]
    return {
        "prefill_tokens_per_second": round(prompt.shape[1] / prefilled),
        "decoding_tokens_per_second": round(1 / decoded, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short, few rounds")
    parser.add_argument("--long", action="store_true", help="65,536 tokens too, forward only; a quarter of an hour")
    arguments = machine_arguments(parser)
    device = arguments.device
    lengths, rounds = ([1024, 2048], 2) if arguments.quick else ([4096, 16384], 3)
    if arguments.long:
        lengths.append(65536)
    figures = {"shape": SHAPE, "layer": layers(lengths, rounds, device), "bst_80m": language_model(rounds, device)}
    write_results("bst_layer", figures, device)


if __name__ == "__main__":
    main()
