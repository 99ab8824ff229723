"""The Triton kernel of one decoded token: convolution and activation in one launch."""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops._core.triton_helpers import load


@triton.jit
def step_kernel(
    x, state, weight, bias, y, x_row, channels, tiles,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = silu(bias + sum_j w_j x_j), the last tap on x, and the state (B, K - 1, D) moves on by x."""
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    d = tile * BLOCK + tl.arange(0, BLOCK)
    inside = d < channels
    total = load(bias + d, inside) if HAS_BIAS else tl.zeros([BLOCK], tl.float32)
    held = state + row * (K - 1) * channels + d
    for j in tl.static_range(K - 1):
        seen = load(held + j * channels, inside)
        total += load(weight + d * K + j, inside) * seen
        if j > 0:
            tl.store(held + (j - 1) * channels, seen, mask=inside)
    newest = load(x + row * x_row + d, inside)
    total += load(weight + d * K + (K - 1), inside) * newest
    if K > 1:
        tl.store(held + (K - 2) * channels, newest, mask=inside)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + row * channels + d, total, mask=inside)
