"""The short causal convolution on CUDA: Triton kernels, and their launches as torch.library ops.

Forward: tiles of BT tokens by BD channels, K shifted loads each. Backward: tokens one after the other. `row * 0` makes
the tokens' numbers 64-bit, and so what they are multiplied with.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_hybrid_ssm.ops.causal_conv.reference import ConvInputs
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, step_op
from hf_hybrid_ssm.ops.core.padding import last_inputs
from hf_hybrid_ssm.ops.core.triton_helpers import (
    contiguous,
    dense_rows,
    device_guard,
    exponential,
    kernel,
    load,
    program_coords,
    reciprocal,
    select_row,
    strides,
    supports,
)
from hf_hybrid_ssm.ops.core.triton_launch import Launcher

__all__ = ["causal_conv_step_triton", "causal_conv_triton", "supports"]

TILE = {"BT": 32, "BD": 64, "num_warps": 4, "enable_fp_fusion": True}
# a lane has two channels; parts of sums and what the tokens after a chunk need are a twentieth of what is read
BACKWARD_TILE = {"T": 16, "BLOCKS": 8, "BD": 64, "num_warps": 1, "enable_fp_fusion": True}
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


@kernel
def forward_kernel(
    x, weight, bias, state, seq_idx, y, x_row, x_step, L, channels, tiles, blocks,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr,
    K: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """y_t = silu(bias + sum_j w_j x_{t-K+1+j})."""
    tile, block, row = program_coords(tl.program_id(0), tiles, blocks)
    t, d = row * 0 + block * BT + tl.arange(0, BT), tile * BD + tl.arange(0, BD)
    is_channel = d < channels
    total = taps_sum(
        x, weight, bias, state, seq_idx, row, t, d, x_row, x_step, L, channels,
        HAS_BIAS, HAS_STATE, HAS_DOCUMENTS, K, BT, BD,
    )  # fmt: skip
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(y + (row * L + t[:, None]) * channels + d[None, :], total, mask=(t < L)[:, None] & is_channel[None, :])


@triton.jit
def between(t, first, end, d):
    """first <= t < end for each of d (the interpreter masks no loads of many by a single truth value)."""
    return (t + 0 * d >= first) & (t + 0 * d < end)


@triton.jit
def token(x, state, row, t, d, is_channel, x_row, x_step, L, channels, K: tl.constexpr, HAS_STATE: tl.constexpr):
    """x at one token for the channels d, that of the state before the row's first, 0 after its last."""
    value = load(x + row * x_row + t * x_step + d, is_channel & between(t, 0, L, d))
    if HAS_STATE:
        value += load(state + (row * (K - 1) + t + (K - 1)) * channels + d, is_channel & between(t, 1 - K, 0, d))
    return value


@kernel
def backward_kernel(
    x, weight, bias, state, seq_idx, grad_y, dx, dstate, dweight_parts, dbias_parts,
    x_row, x_step, g_row, g_step, L, channels, tiles, chunks,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, SILU: tl.constexpr,
    K: tl.constexpr, T: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """dx_t = sum_j w_j g_{t+K-1-j}, where g, the gradient of the sum before silu, is computed again from x.

    Tokens come one after the other, `T` at a time, so that each is read once and the sums need no exchange between
    lanes. A program leaves its part of the weights' gradient, of `BLOCKS` T tokens.
    """
    tile, chunk, row = program_coords(tl.program_id(0), tiles, chunks)
    d = tile * BD + tl.arange(0, BD)
    is_channel = d < channels
    j2 = tl.arange(0, triton.next_power_of_2(K))[:, None]
    taps = ()
    for j in tl.static_range(K):
        taps = taps + (load(weight + d * K + j, is_channel),)  # noqa: RUF005
    bias_d = load(bias + d, is_channel) if HAS_BIAS else tl.zeros([BD], tl.float32)
    dweight, dbias = tl.zeros([triton.next_power_of_2(K), BD], tl.float32), tl.zeros([BD], tl.float32)
    begin = row * 0 + chunk * (BLOCKS * T)
    for block in range(0, tl.minimum(BLOCKS, tl.cdiv(L - begin, T))):
        first = begin + block * T
        tokens, documents, gradients = (), (), ()
        for i in tl.static_range(T + 2 * K - 2):
            t = first - (K - 1) + i
            value = token(x, state, row, t, d, is_channel, x_row, x_step, L, channels, K, HAS_STATE)
            tokens = tokens + (value,)  # noqa: RUF005
            if HAS_DOCUMENTS:
                document = tl.load(seq_idx + row * L + tl.minimum(tl.maximum(t, 0), L - 1))
                documents = documents + (document,)  # noqa: RUF005
        for i in tl.static_range(T + K - 1):
            t = first + i
            g = load(grad_y + row * g_row + t * g_step + d, is_channel & between(t, 0, L, d))
            sources = ()
            total = bias_d
            for j in tl.static_range(K):
                source = tokens[i + j]
                if HAS_DOCUMENTS:
                    source = tl.where(documents[i + j] == documents[i + K - 1], source, 0.0)
                sources = sources + (source,)  # noqa: RUF005
                total += taps[j] * source
            if SILU:
                open_ = reciprocal(1.0 + exponential(-total))
                g = g * open_ * (1.0 + total * (1.0 - open_))
            gradients = gradients + (g,)  # noqa: RUF005
            if i < T:
                dbias += g
                for j in tl.static_range(K):
                    dweight = tl.where(j2 == j, dweight + (g * sources[j])[None, :], dweight)
        for i in tl.static_range(T):
            total = tl.zeros([BD], tl.float32)
            for j in tl.static_range(K):
                g = gradients[i + K - 1 - j]
                if HAS_DOCUMENTS:
                    g = tl.where(documents[i + 2 * K - 2 - j] == documents[i + K - 1], g, 0.0)
                total += taps[j] * g
            tl.store(dx + (row * L + first + i) * channels + d, total, mask=is_channel & between(first + i, 0, L, d))
        if HAS_STATE:
            for i in tl.static_range(K - 1):
                total = tl.zeros([BD], tl.float32)
                for j in tl.static_range(i + 1):
                    g = gradients[i - j]
                    if HAS_DOCUMENTS:
                        g = tl.where(documents[i - j + K - 1] == documents[K - 1], g, 0.0)
                    total += taps[j] * g
                tl.store(dstate + (row * (K - 1) + i) * channels + d, total, mask=is_channel & between(first, 0, 1, d))
    part = row * chunks + chunk
    for j in tl.static_range(K):
        tl.store(dweight_parts + (part * channels + d) * K + j, select_row(dweight, j2, j), mask=is_channel)
    if HAS_BIAS:
        tl.store(dbias_parts + part * channels + d, dbias, mask=is_channel)


def causal_conv_triton(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv`; always returns the final state."""
    x, weight, _, state, seq_idx, lengths, *_ = inputs
    return convolve(*inputs), last_inputs(x, weight.shape[1], state, seq_idx, lengths)


def _empty(inputs: ConvInputs) -> Tensor:
    return inputs.x.new_empty(inputs.x.shape)


def _forward(inputs: ConvInputs) -> Tensor:
    """y (B, L, D) of x (B, L, D), weight (D, K), state (B, K - 1, D)."""
    (x,), y = dense_rows(inputs.x), _empty(inputs)
    weight, bias, initial_state, seq_idx = contiguous(*inputs[1:5])
    tiles, blocks = triton.cdiv(x.shape[2], TILE["BD"]), triton.cdiv(x.shape[1], TILE["BT"])
    if y.numel():
        with device_guard(x):
            forward_kernel[(tiles * blocks * x.shape[0],)](
                x, weight, bias, initial_state, seq_idx, y, *strides(x), *x.shape[1:], tiles, blocks,
                **_flags(weight, initial_state, seq_idx), HAS_BIAS=bias is not None, SILU=inputs.silu, **TILE,
            )  # fmt: skip
    return y


def _backward(inputs: ConvInputs, gradients: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias and the state."""
    x, grad_y = dense_rows(inputs.x, *gradients)
    weight, bias, initial_state, seq_idx = contiguous(*inputs[1:5])
    (batch, length, channels), width = x.shape, weight.shape[1]
    tiles = triton.cdiv(channels, BACKWARD_TILE["BD"])
    chunks = triton.cdiv(length, BACKWARD_TILE["T"] * BACKWARD_TILE["BLOCKS"])
    exact: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    dx = x.new_empty(x.shape)
    dstate = None if initial_state is None else torch.zeros_like(initial_state)
    dweight = torch.empty(batch * chunks, channels, width, **exact)
    dbias = None if bias is None else torch.empty(batch * chunks, channels, **exact)
    if dx.numel():
        with device_guard(x):
            backward_kernel[(tiles * chunks * batch,)](
                x, weight, bias, initial_state, seq_idx, grad_y, dx, dstate, dweight, dbias,
                *strides(x, grad_y), length, channels, tiles, chunks,
                **_flags(weight, initial_state, seq_idx), HAS_BIAS=bias is not None, SILU=inputs.silu, **BACKWARD_TILE,
            )  # fmt: skip
    sums = (None if part is None else part.sum(0).to(like.dtype) for part, like in ((dweight, weight), (dbias, bias)))
    return dx, *sums, dstate


convolve = differentiable_op("hf_hybrid_ssm::causal_conv_triton", ConvInputs, _forward, _backward, _empty)


def _flags(weight: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> dict[str, int]:
    return {
        "K": weight.shape[1],
        "HAS_STATE": initial_state is not None and weight.shape[1] > 1,
        "HAS_DOCUMENTS": seq_idx is not None,
    }


@kernel
def step_kernel(
    x, state, pages, weight, bias, y, x_row, state_row, channels, tiles,
    HAS_BIAS: tl.constexpr, HAS_PAGES: tl.constexpr, SILU: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = silu(bias + sum_j w_j x_j), the last tap on x, and the state (K - 1, D) of the row or page moves on by x."""
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    d = tile * BLOCK + tl.arange(0, BLOCK)
    inside = d < channels
    total = load(bias + d, inside) if HAS_BIAS else tl.zeros([BLOCK], tl.float32)
    page = tl.load(pages + row) if HAS_PAGES else row
    held = state + page * state_row + d
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


launch_step = Launcher(step_kernel)


def causal_conv_step_triton(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, K - 1, D), or (P, K - 1, D) with pages (B,)."""
    (x,), (weight, bias, pages) = dense_rows(inputs.x), contiguous(inputs.weight, inputs.bias, inputs.pages)
    state = inputs.state
    assert state is not None
    return step(ConvInputs(x, weight, bias, state, silu=inputs.silu, pages=pages)), state


def _step(inputs: ConvInputs) -> Tensor:
    """y (B, 1, D); weight is (D, K), the rows of x may lie apart, and so may the pages of state (P, K - 1, D)."""
    x, weight, bias, state, _, _, silu, pages = inputs
    assert state is not None
    y = _empty(inputs)
    channels, width = weight.shape
    if y.numel() == 0:
        return y
    tiles = -(-channels // STEP_TILE["BLOCK"])  # `triton.cdiv` is a function of kernels: five calls of Python
    flags = {"HAS_BIAS": bias is not None, "HAS_PAGES": pages is not None, "SILU": silu, "K": width}
    numbers = (x.stride(0), state.stride(0), channels, tiles)
    launch_step(tiles * x.shape[0], (x, state, pages, weight, bias, y), numbers, {**flags, **STEP_TILE})
    return y


step = step_op(
    "hf_hybrid_ssm::causal_conv_step_triton", _step, _empty, ("state",), device_types=None, inputs=ConvInputs
)
