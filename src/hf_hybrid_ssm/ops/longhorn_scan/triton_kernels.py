"""Triton kernels of the Longhorn scan: tiles of tokens arrive asynchronously, the states stay in registers.

A program walks through time with BD channels. Its states are [S, BD, P]: state n = p S + s, where a lane holds S
states of a channel and P lanes share one, so that with P = 1 sums over states need no exchange between lanes. The
inputs of the next tiles of T tokens are on their way to shared memory (`num_stages`) while T steps run from registers.

What all channels share is prepared once by `prepare_kernel`: keys and queries in float32, |k|² and where documents go
on. The states before every `BLOCK` tokens are checkpoints; the backward computes the states between them again, first
those before every T tokens (to `scratch`), then those of T tokens, in registers.

A row may be split over time between programs: `*_summary_kernel` finds what each split does to the state that enters
it (a product of decays and an end state from zero), `chain_kernel` chains the splits, and the main kernel starts each
split from the right state. Offsets of tokens are 64-bit. Strides of states over channels are known at run time only:
the compiler would otherwise choose the layout of the registers after that of the memory.
"""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import (
    exponential,
    kernel,
    load,
    program_coords,
    reciprocal,
    select_row,
)


@triton.jit
def compute_delta(logit, squared_norm):
    """Delta = 1 / (1 + E + |k|²) and E = exp(-logit); the clamp keeps E finite."""
    e = exponential(-tl.maximum(logit, -80.0))
    return reciprocal(1.0 + e + squared_norm), e


@triton.jit
def broadcast_lanes(tile, T: tl.constexpr, BD: tl.constexpr, P: tl.constexpr):
    """[T, BD] to all lanes of a channel."""
    return tl.broadcast_to(tile[:, :, None], [T, BD, P])


@triton.jit
def in_states(d, lane, num_states, P: tl.constexpr, S: tl.constexpr):
    """Of states (D, N): offsets of those with s = 0, the step from one s to the next, how many there are."""
    p = tl.arange(0, P)[None, :]
    return d[:, None] * (num_states * lane) + p * S, 1, num_states - p * S


@triton.jit
def in_checkpoint(d, lane, num_states, P: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr):
    """As `in_states`, of a checkpoint (D / WIDTH, N, WIDTH)."""
    p = tl.arange(0, P)[None, :]
    at = (d // WIDTH)[:, None] * (num_states * WIDTH) + (d % WIDTH)[:, None] * lane + p * (S * WIDTH)
    return at, WIDTH, num_states - p * S


@triton.jit
def load_states(base, at, step, count, is_channel, s3, S: tl.constexpr, UNROLLED: tl.constexpr = False):
    """[S, BD, P], one s after the other: of loads of whole tiles Triton 3.6 makes the layout of what follows.

    The 64-bit part of an address comes first, so that the rest, which the compiler knows, is no instruction. LLVM
    unrolls the loop. Triton looks from each access at all that hangs together with it: UNROLLED there, this was most
    of the time of compiling. It is worth it where a loop around it loads before its turn, and before the forward's
    loop, which otherwise spills with Triton 3.8 and 3.9 where rows are not aligned.
    """
    tile = tl.zeros([S, at.shape[0], at.shape[1]], tl.float32)
    if UNROLLED:
        for s in tl.static_range(S):
            row = load((base + at) + s * step, is_channel[:, None] & (s < count))
            tile = tl.where(s3 == s, row[None, :, :], tile)
    else:
        for s in tl.range(S):
            row = load((base + at) + s * step, is_channel[:, None] & (s < count))
            tile = tl.where(s3 == s, row[None, :, :], tile)
    return tile


@triton.jit
def store_states(base, at, step, count, is_channel, tile, s3, S: tl.constexpr):
    for s in tl.range(S):  # unrolled by LLVM, as in `load_states`
        tl.store((base + at) + s * step, select_row(tile, s3, s), mask=is_channel[:, None] & (s < count))


@kernel
def prepare_kernel(
    k, q, seq_idx, keys, queries, norms, keeps,
    k_row, k_step, q_row, q_step, L, padded, num_states, tiles,
    HAS_DOCUMENTS: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """keys, queries (B, padded, BN) with zeros around; norms |k|² and keeps (B, padded).

    keeps is 1 where a token continues the document of the one before it, or lies beyond the row's end, else 0.
    """
    tile, _, row = program_coords(tl.program_id(0), tiles, 1)
    t, n = tile * T + row * 0 + tl.arange(0, T), tl.arange(0, BN)
    real = (t < L)[:, None] & (n < num_states)[None, :]
    k_t = load(k + row * k_row + t[:, None] * k_step + n[None, :], real)
    q_t = load(q + row * q_row + t[:, None] * q_step + n[None, :], real)
    inside, at = t < padded, row * padded + t
    tl.store(keys + at[:, None] * BN + n[None, :], k_t, mask=inside[:, None])
    tl.store(queries + at[:, None] * BN + n[None, :], q_t, mask=inside[:, None])
    tl.store(norms + at, tl.sum(k_t * k_t, 1), mask=inside)
    if HAS_DOCUMENTS:
        follows = (t > 0) & (t < L)
        here = tl.load(seq_idx + row * L + t, mask=follows, other=0)
        before = tl.load(seq_idx + row * L + t - 1, mask=follows, other=0)
        tl.store(keeps + at, tl.where(here == before, 1.0, 0.0), mask=inside)


@kernel
def forward_kernel(
    x, beta_logit, z, keys, queries, norms, keeps, beta_bias, skip, initial_states, o, final_state, checkpoints,
    x_row, x_step, logit_row, logit_step, z_row, z_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_STATES: tl.constexpr, SAVE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h += k (Delta x - Delta k h), o = (q·h + D x) silu(z): one split of one row for BD channels."""
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d, t, wide = tile * BD + tl.arange(0, BD), tl.arange(0, T), row * 0  # makes what it is added to 64-bit
    is_channel = d < channels
    s3, t3, t4 = tl.arange(0, S)[:, None, None], t[:, None, None], t[:, None, None, None]
    in_keys = (t3 * P + tl.arange(0, P)[None, None, :]) * S + tl.arange(0, S)[None, :, None]
    at, next_state, count = in_states(d, lane, num_states, P, S)
    size = num_states * channels
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    through = load(skip + d, is_channel) if HAS_SKIP else 0.0
    h = tl.zeros([S, BD, P], tl.float32)
    if HAS_STATES:
        entering = initial_states + (row * num_splits + split) * size
        h = load_states(entering, at, next_state, count, is_channel, s3, S, True)
    last = tl.minimum((split + 1) * blocks_per_split, num_blocks) * (BLOCK // T)
    for step in tl.range(split * blocks_per_split * (BLOCK // T), last, num_stages=STAGES):
        first = step * T + wide
        shared = row * num_blocks * BLOCK + first
        real = (t < L - first)[:, None] & is_channel[None, :]
        x_t = load(x + row * x_row + first * x_step + (t[:, None] * x_step + d[None, :]), real)
        logit = load(beta_logit + row * logit_row + first * logit_step + (t[:, None] * logit_step + d[None, :]), real)
        key, query = tl.load(keys + shared * (S * P) + in_keys), tl.load(queries + shared * (S * P) + in_keys)
        delta, _ = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
        key, query = (
            tl.broadcast_to(key[:, :, None, :], [T, S, BD, P]),
            tl.broadcast_to(query[:, :, None, :], [T, S, BD, P]),
        )
        deltas, writes = broadcast_lanes(delta, T, BD, P), broadcast_lanes(delta * x_t, T, BD, P)
        if HAS_DOCUMENTS:
            keep = broadcast_lanes(tl.broadcast_to(tl.load(keeps + shared + t)[:, None], [T, BD]), T, BD, P)
        if SAVE and step % (BLOCK // T) == 0:
            here = (
                checkpoints + (row * num_blocks + step // (BLOCK // T)) * tl.cdiv(channels, WIDTH) * num_states * WIDTH
            )
            saved_at, next_saved, saved_count = in_checkpoint(d, lane, num_states, P, S, WIDTH)
            store_states(here, saved_at, next_saved, saved_count, is_channel, h, s3, S)
        y = tl.zeros([T, BD, P], tl.float32)
        for i in tl.static_range(T):
            k_i = select_row(key, t4, i)
            if HAS_DOCUMENTS:
                h = h * select_row(keep, t3, i)[None, :, :]
            h += k_i * (select_row(writes, t3, i)[None, :, :] - select_row(deltas, t3, i)[None, :, :] * k_i * h)
            y_i = tl.sum(h * select_row(query, t4, i), 0)
            y = tl.where(t3 == i, y_i[None, :, :], y)
        o_t = tl.sum(y, 2) + through * x_t
        if HAS_GATE:
            z_t = load(z + row * z_row + first * z_step + (t[:, None] * z_step + d[None, :]), real)
            o_t = o_t * z_t * reciprocal(1.0 + exponential(-z_t))
        tl.store(o + (row * L + first) * channels + (t[:, None] * channels + d[None, :]), o_t, mask=real)
    if split == num_splits - 1:
        store_states(final_state + row * size, at, next_state, count, is_channel, h, s3, S)


@kernel
def forward_summary_kernel(
    x, beta_logit, keys, norms, keeps, beta_bias, products, ends,
    x_row, x_step, logit_row, logit_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of one split: the product of its decays and its end state if it started from zero, both (B, splits, D, N)."""
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d, t, wide = tile * BD + tl.arange(0, BD), tl.arange(0, T), row * 0  # makes what it is added to 64-bit
    is_channel = d < channels
    s3, t3, t4 = tl.arange(0, S)[:, None, None], t[:, None, None], t[:, None, None, None]
    in_keys = (t3 * P + tl.arange(0, P)[None, None, :]) * S + tl.arange(0, S)[None, :, None]
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    h = tl.zeros([S, BD, P], tl.float32)
    product = tl.full([S, BD, P], 1.0, tl.float32)
    last = tl.minimum((split + 1) * blocks_per_split, num_blocks) * (BLOCK // T)
    for step in tl.range(split * blocks_per_split * (BLOCK // T), last, num_stages=STAGES):
        first = step * T + wide
        shared = row * num_blocks * BLOCK + first
        real = (t < L - first)[:, None] & is_channel[None, :]
        x_t = load(x + row * x_row + first * x_step + (t[:, None] * x_step + d[None, :]), real)
        logit = load(beta_logit + row * logit_row + first * logit_step + (t[:, None] * logit_step + d[None, :]), real)
        delta, _ = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
        key = tl.broadcast_to(tl.load(keys + shared * (S * P) + in_keys)[:, :, None, :], [T, S, BD, P])
        deltas, writes = broadcast_lanes(delta, T, BD, P), broadcast_lanes(delta * x_t, T, BD, P)
        if HAS_DOCUMENTS:
            keep = broadcast_lanes(tl.broadcast_to(tl.load(keeps + shared + t)[:, None], [T, BD]), T, BD, P)
        for i in tl.static_range(T):
            k_i = select_row(key, t4, i)
            delta_k = select_row(deltas, t3, i)[None, :, :] * k_i
            if HAS_DOCUMENTS:
                keep_i = select_row(keep, t3, i)[None, :, :]
                h = h * keep_i
                product = product * keep_i
            h += k_i * (select_row(writes, t3, i)[None, :, :] - delta_k * h)
            product = product * (1.0 - delta_k * k_i)
    at, next_state, count = in_states(d, lane, num_states, P, S)
    here = (row * num_splits + split) * num_states * channels
    store_states(products + here, at, next_state, count, is_channel, product, s3, S)
    store_states(ends + here, at, next_state, count, is_channel, h, s3, S)


@kernel
def chain_kernel(
    products, ends, outer_state, initial_states, size, num_splits, tiles,
    HAS_STATE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What enters each split: `outer_state` (B, D, N) the first (the last if REVERSE), then product · state + end."""
    tile, _, row = program_coords(tl.program_id(0), tiles, 1)
    i = tile * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_STATE:
        state = tl.load(outer_state + row * size + i, mask=inside, other=0.0)
    for step in tl.range(0, num_splits, num_stages=4):
        split = num_splits - 1 - step if REVERSE else step
        here = (row * num_splits + split) * size + i
        tl.store(initial_states + here, state, mask=inside)
        product = tl.load(products + here, mask=inside, other=0.0)
        state = product * state + tl.load(ends + here, mask=inside, other=0.0)
