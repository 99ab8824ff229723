"""The short causal convolution on CUDA: Triton kernels, and their launches as torch.library ops.

Tiles of BT tokens by BD channels, K shifted loads each. `row * 0` makes the tokens' numbers 64-bit, and so what they
are multiplied with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_hybrid_ssm.ops._core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops._core.rows import last_inputs
from hf_hybrid_ssm.ops._core.triton_helpers import contiguous, dense_rows, device_guard, load, strides, supports

__all__ = ["causal_conv_step_triton", "causal_conv_triton", "supports"]

TILE = {"BT": 32, "BD": 64, "num_warps": 4, "enable_fp_fusion": True}
STEP_TILE = {"BLOCK": 128, "num_warps": 4}  # channels of a program


@triton.jit
def shifted(
    x, state, seq_idx, row, source, target, d, x_row, x_step, L, channels,
    K: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """x at the tokens `source` (the state's where they are negative), 0 where `target` is of another document."""
    is_channel = d[None, :] < channels
    here = (source >= 0) & (source < L) & (target >= 0) & (target < L)
    value = tl.load(
        x + row * x_row + source[:, None] * x_step + d[None, :], mask=here[:, None] & is_channel, other=0.0
    )
    value = value.to(tl.float32)
    inside = (target >= 0) & (target < L)
    if HAS_STATE:
        early = (source < 0) & inside
        at = (row * (K - 1) + source[:, None] + (K - 1)) * channels + d[None, :]
        value += load(state + at, early[:, None] & is_channel)
    if HAS_DOCUMENTS:
        document = tl.load(seq_idx + row * L + target, mask=inside, other=0)
        origin = tl.load(seq_idx + row * L + tl.maximum(source, 0), mask=inside, other=0)
        value = tl.where((document == origin)[:, None], value, 0.0)
    return value


@triton.jit
def taps_sum(
    x, weight, bias, state, seq_idx, row, t, d, x_row, x_step, L, channels,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """bias + sum_j w_j x_{t-K+1+j} at the tokens t, [BT, BD]."""
    is_channel = d < channels
    total = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(K):
        tap = load(weight + d * K + j, is_channel)
        total += tap[None, :] * shifted(
            x, state, seq_idx, row, t - (K - 1) + j, t, d, x_row, x_step, L, channels, K, HAS_STATE, HAS_DOCUMENTS
        )
    if HAS_BIAS:
        total += load(bias + d, is_channel)[None, :]
    return total


@triton.jit
def forward_kernel(
    x, weight, bias, state, seq_idx, y, x_row, x_step, L, channels,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y_t = silu(bias + sum_j w_j x_{t-K+1+j})."""
    row = tl.program_id(2).to(tl.int64)
    t, d = row * 0 + tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BD + tl.arange(0, BD)
    is_channel = d < channels
    total = taps_sum(
        x, weight, bias, state, seq_idx, row, t, d, x_row, x_step, L, channels,
        HAS_BIAS, HAS_STATE, HAS_DOCUMENTS, K, BT, BD,
    )  # fmt: skip
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + (row * L + t[:, None]) * channels + d[None, :], total, mask=(t < L)[:, None] & is_channel[None, :])


@triton.jit
def weight_gradient_kernel(
    x, weight, bias, state, seq_idx, grad_y, grad_sum, dweight_parts, dbias_parts,
    x_row, x_step, g_row, g_step, L, channels,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradient of the sum before silu (computed again from x), and this tile's share of those of the weights."""
    row = tl.program_id(2).to(tl.int64)
    t, d = row * 0 + tl.program_id(1) * BT + tl.arange(0, BT), tl.program_id(0) * BD + tl.arange(0, BD)
    is_channel = d < channels
    ok = (t < L)[:, None] & is_channel[None, :]
    g = load(grad_y + row * g_row + t[:, None] * g_step + d[None, :], ok)
    if SILU:
        total = taps_sum(
            x, weight, bias, state, seq_idx, row, t, d, x_row, x_step, L, channels,
            HAS_BIAS, HAS_STATE, HAS_DOCUMENTS, K, BT, BD,
        )  # fmt: skip
        open_ = tl.sigmoid(total)
        g = g * open_ * (1.0 + total * (1.0 - open_))
    tl.store(grad_sum + (row * L + t[:, None]) * channels + d[None, :], g, mask=ok)
    part = row * tl.num_programs(1) + tl.program_id(1)
    for j in tl.static_range(K):
        source = shifted(
            x, state, seq_idx, row, t - (K - 1) + j, t, d, x_row, x_step, L, channels, K, HAS_STATE, HAS_DOCUMENTS
        )
        tl.store(dweight_parts + (part * channels + d) * K + j, tl.sum(g * source, 0), mask=is_channel)
    if HAS_BIAS:
        tl.store(dbias_parts + part * channels + d, tl.sum(g, 0), mask=is_channel)


@triton.jit
def input_gradient_kernel(
    grad_sum, weight, seq_idx, dx, dstate, L, channels,
    HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx_t = sum_j w_j g_{t+K-1-j}, from the first token of the state (t = -(K - 1)) on."""
    row = tl.program_id(2).to(tl.int64)
    t = row * 0 + tl.program_id(1) * BT + tl.arange(0, BT) - (K - 1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    is_channel = d < channels
    total = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(K):
        target = t + (K - 1) - j
        inside = (target >= 0) & (target < L) & (t < L)
        tap = load(weight + d * K + j, is_channel)
        at = (row * L + target[:, None]) * channels + d[None, :]
        g = tl.load(grad_sum + at, mask=inside[:, None] & is_channel[None, :], other=0.0)
        if HAS_DOCUMENTS:
            document = tl.load(seq_idx + row * L + target, mask=inside, other=0)
            origin = tl.load(seq_idx + row * L + tl.maximum(t, 0), mask=inside, other=0)
            g = tl.where((document == origin)[:, None], g, 0.0)
        total += tap[None, :] * g
    is_token = (t >= 0) & (t < L)
    tl.store(dx + (row * L + t[:, None]) * channels + d[None, :], total, mask=is_token[:, None] & is_channel[None, :])
    if HAS_STATE:
        at = (row * (K - 1) + t[:, None] + (K - 1)) * channels + d[None, :]
        tl.store(dstate + at, total, mask=(t < 0)[:, None] & is_channel[None, :])


def causal_conv_triton(x, weight, bias=None, *, activation=None, initial_state=None, seq_idx=None, lengths=None):
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv`; always returns the final state."""
    y = convolve(x, weight, bias, initial_state, seq_idx, activation == "silu")
    return y, last_inputs(x, weight.shape[1], initial_state, seq_idx, lengths)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, seq_idx: Tensor | None, silu: bool
) -> Tensor:
    """y (B, L, D) of x (B, L, D), weight (D, K), state (B, K - 1, D)."""
    (x,) = dense_rows(x)
    weight, bias, initial_state, seq_idx = contiguous(weight, bias, initial_state, seq_idx)
    y = x.new_empty(x.shape)
    if y.numel():
        with device_guard(x):
            forward_kernel[_grid(x, x.shape[1])](
                x, weight, bias, initial_state, seq_idx, y, *strides(x), *x.shape[1:],
                **_flags(weight, initial_state, seq_idx), HAS_BIAS=bias is not None, SILU=silu, **TILE,
            )  # fmt: skip
    return y


def _backward(inputs, gradients, needed):
    """Of x, weight, bias and the state."""
    *tensors, silu = inputs
    x, grad_y = dense_rows(tensors[0], *gradients)
    weight, bias, initial_state, seq_idx = contiguous(*tensors[1:])
    batch, length, channels = x.shape
    width = weight.shape[1]
    grid = _grid(x, length)
    parts = batch * grid[1]
    exact = {"dtype": torch.float32, "device": x.device}
    dx, grad_sum = x.new_empty(x.shape), torch.empty(x.shape, **exact)
    dstate = None if initial_state is None else torch.zeros_like(initial_state)
    dweight = torch.empty(parts, channels, width, **exact)
    dbias = None if bias is None else torch.empty(parts, channels, **exact)
    flags = _flags(weight, initial_state, seq_idx)
    if dx.numel():
        with device_guard(x):
            weight_gradient_kernel[grid](
                x, weight, bias, initial_state, seq_idx, grad_y, grad_sum, dweight, dbias,
                *strides(x, grad_y), length, channels,
                **flags, HAS_BIAS=bias is not None, SILU=silu, **TILE,
            )  # fmt: skip
            input_gradient_kernel[_grid(x, length + width - 1)](
                grad_sum, weight, seq_idx, dx, dstate, length, channels, **flags, **TILE
            )
    sums = (None if part is None else part.sum(0).to(like.dtype) for part, like in ((dweight, weight), (dbias, bias)))
    return dx, *sums, dstate


convolve = differentiable_op(
    "hf_hybrid_ssm::causal_conv_triton", _forward, _backward, fake=lambda x, *_: x.new_empty(x.shape)
)


def _grid(x: Tensor, length: int) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[2], TILE["BD"]), triton.cdiv(length, TILE["BT"]), x.shape[0]


def _flags(weight: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> dict[str, int]:
    return {
        "K": weight.shape[1],
        "HAS_STATE": initial_state is not None and weight.shape[1] > 1,
        "HAS_DOCUMENTS": seq_idx is not None,
    }


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


def causal_conv_step_triton(x, state, weight, bias=None, *, activation=None):
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv_step`; → y and the state (B, K - 1, D), which is overwritten."""
    return step(*dense_rows(x), state, *contiguous(weight, bias), activation == "silu"), state


@torch.library.custom_op("hf_hybrid_ssm::causal_conv_step_triton", mutates_args=("state",))
def step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y (B, D); weight is (D, K), the rows of x may lie apart."""
    y = x.new_empty(x.shape)
    channels, width = weight.shape
    if y.numel() == 0:
        return y
    tiles = triton.cdiv(channels, STEP_TILE["BLOCK"])
    with device_guard(x):
        step_kernel[(tiles * x.shape[0],)](
            x, state, weight, bias, y, x.stride(0), channels, tiles,
            HAS_BIAS=bias is not None, SILU=silu, K=width, **STEP_TILE,
        )  # fmt: skip
    return y


@step.register_fake
def _(x, state, weight, bias, silu):
    return x.new_empty(x.shape)
