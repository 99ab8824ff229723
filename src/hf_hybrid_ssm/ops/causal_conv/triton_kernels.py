"""Triton kernels of the short causal convolution: tiles of BT tokens by BD channels, K shifted loads each.

`row * 0` makes the tokens' numbers 64-bit, and so what they are multiplied with.
"""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops._core.triton_helpers import load


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
