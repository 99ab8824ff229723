"""Is window attention, forward and backward, linear, and how does it compare with a masked full attention and with the
local attention of transformers' LongT5?

Window 128 (causal: the token and the 127 before it), 12 heads of 64, float32, one row.
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import (
    exponent,
    machine_arguments,
    paired_seconds,
    write_results,
)
from torch import nn
from transformers import LongT5Config
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention

from hf_hybrid_ssm.ops.local_attention import local_attention

HEADS, SIZE, WINDOW = 12, 64, 128
WIDTH = HEADS * SIZE


def inputs(length: int, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, SIZE, generator=generator).to(device).requires_grad_() for _ in range(3)]


def window(length: int, device: str) -> Callable[[], None]:
    """This package's op."""
    q, k, v = inputs(length, device)

    def run() -> None:
        local_attention(q, k, v, window=(WINDOW - 1, 0))[0].sum().backward()

    return run


def masked(length: int, device: str) -> Callable[[], None]:
    """`scaled_dot_product_attention` over all keys, with the window as a mask."""
    q, k, v = inputs(length, device)
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    mask = (distance >= 0) & (distance < WINDOW)

    def run() -> None:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()

    return run


class WindowSublayer(nn.Module):
    """The op between projections, with a learned bias by distance: what LongT5's layer computes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(HEADS, 2 * WINDOW - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y, _ = local_attention(q, k, v, window=(WINDOW - 1, WINDOW - 1), bias=self.bias)
        return self.o(y.transpose(1, 2).flatten(2))


def sublayer(module: nn.Module, length: int, device: str) -> Callable[[], None]:
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    module.to(device)
    is_longt5 = isinstance(module, LongT5LocalAttention)

    def run() -> None:
        y = module(x)[0] if is_longt5 else module(x)
        y.sum().backward()

    return run


def longt5_sublayer() -> nn.Module:
    config = LongT5Config(d_model=WIDTH, num_heads=HEADS, d_kv=SIZE, local_radius=WINDOW - 1, dropout_rate=0.0)
    return LongT5LocalAttention(config, has_relative_attention_bias=True)


def without_projections(module: nn.Module) -> nn.Module:
    """The attention itself: the four linear maps, which cost both sides the same, are gone."""
    for name in "qkvo":
        setattr(module, name, nn.Identity())
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short lengths, few rounds")
    arguments = machine_arguments(parser)
    device = arguments.device
    lengths = [512, 1024] if arguments.quick else [1024, 2048, 4096, 8192, 16384]
    compared = lengths[-1:] if arguments.quick else [4096, 16384]
    rounds = 3 if arguments.quick else 7
    seconds = paired_seconds({str(length): window(length, device) for length in lengths}, rounds=rounds, device=device)
    against_mask, against_longt5, whole_sublayer = {}, {}, {}
    for length in compared:
        pair = paired_seconds(
            {"window": window(length, device), "masked": masked(length, device)}, rounds=3, warm_up=1, device=device
        )
        against_mask[str(length)] = round(pair["masked"] / pair["window"], 1)
    for length in compared[:1]:
        for ratios, change in ((against_longt5, without_projections), (whole_sublayer, lambda module: module)):
            modules = {"window": change(WindowSublayer()), "longt5": change(longt5_sublayer())}
            steps = {name: sublayer(module, length, device) for name, module in modules.items()}
            pair = paired_seconds(steps, rounds=rounds, warm_up=2, device=device)
            ratios[str(length)] = round(pair["longt5"] / pair["window"], 2)
    figures = {
        "shape": {"heads": HEADS, "head_dim": SIZE, "window": WINDOW, "batch": 1, "dtype": "float32"},
        "seconds": {length: round(value, 4) for length, value in seconds.items()},
        "exponent": round(exponent(lengths, list(seconds.values())), 3),
        "times_as_fast_as_masked_full_attention": against_mask,
        "times_as_fast_as_longt5_local_attention_two_sided": against_longt5,
        "times_as_fast_as_longt5_local_attention_two_sided_with_projections": whole_sublayer,
    }
    write_results("local_attention", figures, device)


if __name__ == "__main__":
    main()
