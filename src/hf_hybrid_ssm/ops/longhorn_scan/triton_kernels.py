"""Triton kernels of the Longhorn scan: the state stays in registers while a program walks through time.

A program holds the state of BD channels, [BN, BD] with the state index first, so that a lane owns whole channels and
sums over the state index need no exchange between lanes. Time is cut into blocks of T tokens; the state before each
block is the checkpoint from which the backward kernel computes the states again. Buffers of states that only these
kernels see are (..., N, D), channels last, so that they load in full lines.

A row may be split over time between programs: `*_summary_kernel` finds what each split does to the state that enters
it (a product of decays and an end state from zero), `chain_kernel` chains the splits, and the main kernel starts each
split from the right state.
"""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops._core.triton_helpers import load


@triton.jit
def compute_delta(logit, squared_norm):
    """Delta = 1 / (1 + E + |k|²) and E · Delta, E = exp(-logit); the clamp keeps E · Delta finite."""
    e = tl.exp(-tl.maximum(logit, -80.0))
    delta = 1.0 / (1.0 + e + squared_norm)
    return delta, e * delta


@triton.jit
def keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS: tl.constexpr):
    """1.0 where token t continues the document of token t - 1 or lies after the row's end, else 0.0."""
    if HAS_DOCUMENTS:
        here = tl.minimum(t, L - 1)
        before = tl.where(t < L, tl.maximum(t - 1, 0), here)
        continues = tl.load(seq_idx + row * L + here) == tl.load(seq_idx + row * L + before)
        return tl.where(continues, 1.0, 0.0)
    else:
        return 1.0


@triton.jit
def forward_kernel(
    x, beta_logit, z, k, q, beta_bias, skip, seq_idx, initial_states, o, final_state, checkpoints,
    x_row, x_step, logit_row, logit_step, z_row, z_step, k_row, k_step, q_row, q_step,
    L, channels, num_states, num_blocks, blocks_per_split,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_STATES: tl.constexpr, SAVE: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """h = a h + b, o = (q·h + D x) silu(z), one split of one row for BD channels."""
    split, num_splits, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d, n = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN)
    is_channel, is_state = d < channels, n < num_states
    in_tile = is_state[:, None] & is_channel[None, :]
    tile = n[:, None] * channels + d[None, :]
    size = num_states * channels
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    through = load(skip + d, is_channel) if HAS_SKIP else 0.0
    h = tl.zeros([BN, BD], tl.float32)
    if HAS_STATES:
        h = tl.load(initial_states + (row * num_splits + split) * size + tile, mask=in_tile, other=0.0)
    for block in range(split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)):
        if SAVE:
            tl.store(checkpoints + (row * num_blocks + block) * size + tile, h, mask=in_tile)
        for t in range(block * T, tl.minimum(block * T + T, L)):
            k_t = load(k + row * k_row + t * k_step + n, is_state)
            q_t = load(q + row * q_row + t * q_step + n, is_state)
            x_t = load(x + row * x_row + t * x_step + d, is_channel)
            logit = load(beta_logit + row * logit_row + t * logit_step + d, is_channel) + bias
            delta, _ = compute_delta(logit, tl.sum(k_t * k_t))
            h = h * keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS)
            h = (1.0 - delta[None, :] * (k_t * k_t)[:, None]) * h + (delta * x_t)[None, :] * k_t[:, None]
            o_t = tl.sum(h * q_t[:, None], 0) + through * x_t
            if HAS_GATE:
                z_t = load(z + row * z_row + t * z_step + d, is_channel)
                o_t = o_t * z_t * tl.sigmoid(z_t)
            tl.store(o + (row * L + t) * channels + d, o_t, mask=is_channel)
    if split == num_splits - 1:
        public = d[None, :] * num_states + n[:, None]
        tl.store(final_state + row * size + public, h, mask=in_tile)


@triton.jit
def forward_summary_kernel(
    x, beta_logit, k, beta_bias, seq_idx, products, ends,
    x_row, x_step, logit_row, logit_step, k_row, k_step,
    L, channels, num_states, num_blocks, blocks_per_split,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of one split: the product of its decays and its end state if it started from zero, both (B, splits, N, D)."""
    split, num_splits, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d, n = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN)
    is_channel, is_state = d < channels, n < num_states
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    h = tl.zeros([BN, BD], tl.float32)
    product = tl.full([BN, BD], 1.0, tl.float32)
    last = tl.minimum((split + 1) * blocks_per_split, num_blocks) * T
    for t in range(split * blocks_per_split * T, tl.minimum(last, L)):
        k_t = load(k + row * k_row + t * k_step + n, is_state)
        x_t = load(x + row * x_row + t * x_step + d, is_channel)
        logit = load(beta_logit + row * logit_row + t * logit_step + d, is_channel) + bias
        delta, _ = compute_delta(logit, tl.sum(k_t * k_t))
        decay = 1.0 - delta[None, :] * (k_t * k_t)[:, None]
        decay = decay * keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS)
        h = decay * h + (delta * x_t)[None, :] * k_t[:, None]
        product = product * decay
    in_tile = is_state[:, None] & is_channel[None, :]
    here = (row * num_splits + split) * num_states * channels + n[:, None] * channels + d[None, :]
    tl.store(products + here, product, mask=in_tile)
    tl.store(ends + here, h, mask=in_tile)


@triton.jit
def backward_summary_kernel(
    beta_logit, z, k, q, grad_o, beta_bias, seq_idx, products, ends,
    logit_row, logit_step, z_row, z_step, k_row, k_step, q_row, q_step, g_row, g_step,
    L, channels, num_states, num_blocks, blocks_per_split,
    HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    T: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """As `forward_summary_kernel`, for the gradient that runs backwards through time."""
    split, num_splits, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d, n = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN)
    is_channel, is_state = d < channels, n < num_states
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    grad_state = tl.zeros([BN, BD], tl.float32)
    product = tl.full([BN, BD], 1.0, tl.float32)
    first = split * blocks_per_split * T
    last = tl.minimum(tl.minimum((split + 1) * blocks_per_split, num_blocks) * T, L)
    for step in range(0, last - first):
        t = last - 1 - step
        k_t = load(k + row * k_row + t * k_step + n, is_state)
        q_t = load(q + row * q_row + t * q_step + n, is_state)
        g = load(grad_o + row * g_row + t * g_step + d, is_channel)
        logit = load(beta_logit + row * logit_row + t * logit_step + d, is_channel) + bias
        if HAS_GATE:
            z_t = load(z + row * z_row + t * z_step + d, is_channel)
            g = g * z_t * tl.sigmoid(z_t)
        delta, _ = compute_delta(logit, tl.sum(k_t * k_t))
        decay = 1.0 - delta[None, :] * (k_t * k_t)[:, None]
        decay = decay * keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS)
        grad_state = decay * (grad_state + g[None, :] * q_t[:, None])
        product = product * decay
    in_tile = is_state[:, None] & is_channel[None, :]
    here = (row * num_splits + split) * num_states * channels + n[:, None] * channels + d[None, :]
    tl.store(products + here, product, mask=in_tile)
    tl.store(ends + here, grad_state, mask=in_tile)


@triton.jit
def chain_kernel(
    products, ends, outer_state, initial_states, size, num_splits,
    HAS_STATE: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What enters each split: `outer_state` (B, N, D) the first (the last if REVERSE), then product · state + end."""
    row, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    state = tl.zeros([BLOCK], tl.float32)
    if HAS_STATE:
        state = tl.load(outer_state + row * size + i, mask=inside, other=0.0)
    for step in range(0, num_splits):
        split = num_splits - 1 - step if REVERSE else step
        here = (row * num_splits + split) * size + i
        tl.store(initial_states + here, state, mask=inside)
        product = tl.load(products + here, mask=inside, other=0.0)
        state = product * state + tl.load(ends + here, mask=inside, other=0.0)


@triton.jit
def backward_kernel(
    x, beta_logit, z, k, q, grad_o, beta_bias, skip, seq_idx, checkpoints, grad_states, scratch,
    dx, dlogit, dz, dk_parts, dq_parts, dbias_parts, dskip_parts, dinitial,
    x_row, x_step, logit_row, logit_step, z_row, z_step, k_row, k_step, q_row, q_step, g_row, g_step,
    L, channels, num_states, num_blocks, blocks_per_split,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_GRAD_STATES: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All gradients of one split of one row for BD channels.

    For each block, last first: the states before every S-th token go to `scratch` (private to the program), then each
    S tokens are walked forwards, keeping their states in registers, and backwards. `grad_state` is what dL/dh_t
    gets from later tokens. Sums over channels are written per channel tile and added up afterwards, in fixed order.
    """
    pid, split, num_splits, row = tl.program_id(0), tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    d, n = pid * BD + tl.arange(0, BD), tl.arange(0, BN)
    is_channel, is_state = d < channels, n < num_states
    in_tile = is_state[:, None] & is_channel[None, :]
    tile = n[:, None] * channels + d[None, :]
    size = num_states * channels
    own = scratch + ((row * num_splits + split) * tl.num_programs(0) + pid) * (T // S) * BN * BD
    own_tile = n[:, None] * BD + tl.arange(0, BD)[None, :]
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    through = load(skip + d, is_channel) if HAS_SKIP else 0.0
    grad_state = tl.zeros([BN, BD], tl.float32)
    if HAS_GRAD_STATES:
        grad_state = tl.load(grad_states + (row * num_splits + split) * size + tile, mask=in_tile, other=0.0)
    dbias = tl.zeros([BD], tl.float32)
    dskip = tl.zeros([BD], tl.float32)
    parts = (pid.to(tl.int64) * tl.num_programs(2) + row) * L * num_states
    first = split * blocks_per_split
    last = tl.minimum((split + 1) * blocks_per_split, num_blocks)
    for block_step in range(0, last - first):
        block = last - 1 - block_step
        if block * T < L:
            h = tl.load(checkpoints + (row * num_blocks + block) * size + tile, mask=in_tile, other=0.0)
            for sub in range(0, T // S):
                tl.store(own + sub * BN * BD + own_tile, h)
                if sub < T // S - 1:
                    for t in range(block * T + sub * S, tl.minimum(block * T + sub * S + S, L)):
                        k_t = load(k + row * k_row + t * k_step + n, is_state)
                        x_t = load(x + row * x_row + t * x_step + d, is_channel)
                        logit = load(beta_logit + row * logit_row + t * logit_step + d, is_channel) + bias
                        delta, _ = compute_delta(logit, tl.sum(k_t * k_t))
                        h = h * keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS)
                        h = (1.0 - delta[None, :] * (k_t * k_t)[:, None]) * h + (delta * x_t)[None, :] * k_t[:, None]
            tl.debug_barrier()  # the lanes that read a state below may not be those that wrote it
            for back in range(0, T // S):
                base = block * T + (T // S - 1 - back) * S
                h = tl.load(own + (T // S - 1 - back) * BN * BD + own_tile)
                before = ()  # the states that the tokens base .. base + S - 1 meet
                for s in tl.static_range(S):
                    t = base + s
                    real_n = n < tl.where(t < L, num_states, 0)
                    real_d = d < tl.where(t < L, channels, 0)
                    k_t = load(k + row * k_row + t * k_step + n, real_n)
                    x_t = tl.load(x + row * x_row + t * x_step + d, mask=real_d, other=0.0)
                    logit = tl.load(beta_logit + row * logit_row + t * logit_step + d, mask=real_d, other=0.0)
                    delta, _ = compute_delta(logit.to(tl.float32) + bias, tl.sum(k_t * k_t))
                    h = h * keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS)
                    before = before + (h,)  # type: ignore[assignment]  # noqa: RUF005 - the compiler knows no unpacking
                    step = (delta * x_t.to(tl.float32))[None, :] * k_t[:, None]
                    h = (1.0 - delta[None, :] * (k_t * k_t)[:, None]) * h + step
                for s in tl.static_range(S - 1, -1, -1):
                    t = base + s
                    real_n = n < tl.where(t < L, num_states, 0)
                    real_d = d < tl.where(t < L, channels, 0)
                    k_t = load(k + row * k_row + t * k_step + n, real_n)
                    q_t = load(q + row * q_row + t * q_step + n, real_n)
                    x_t = load(x + row * x_row + t * x_step + d, real_d)
                    logit = load(beta_logit + row * logit_row + t * logit_step + d, real_d) + bias
                    g = load(grad_o + row * g_row + t * g_step + d, real_d)
                    delta, e_delta = compute_delta(logit, tl.sum(k_t * k_t))
                    error = x_t[None, :] - k_t[:, None] * before[s]
                    h_t = before[s] + delta[None, :] * k_t[:, None] * error
                    at = (row * L + t) * channels + d
                    if HAS_GATE:
                        z_t = load(z + row * z_row + t * z_step + d, real_d)
                        open_ = tl.sigmoid(z_t)
                        y_t = tl.sum(h_t * q_t[:, None], 0) + through * x_t
                        tl.store(dz + at, g * y_t * open_ * (1.0 + z_t * (1.0 - open_)), mask=real_d)
                        g = g * z_t * open_
                    lam = grad_state + g[None, :] * q_t[:, None]
                    lam_k = lam * k_t[:, None]
                    ddelta = tl.sum(lam_k * error, 0)
                    dlogit_t = ddelta * delta * e_delta
                    tl.store(dx + at, g * through + delta * tl.sum(lam_k, 0), mask=real_d)
                    tl.store(dlogit + at, dlogit_t, mask=real_d)
                    dq_t = tl.sum(g[None, :] * h_t, 1)
                    dk_t = tl.sum(delta[None, :] * lam * (error - k_t[:, None] * before[s]), 1)
                    dk_t -= 2.0 * k_t * tl.sum(delta * delta * ddelta)
                    tl.store(dq_parts + parts + t * num_states + n, dq_t, mask=real_n)
                    tl.store(dk_parts + parts + t * num_states + n, dk_t, mask=real_n)
                    dbias += dlogit_t
                    dskip += g * x_t
                    grad_state = (1.0 - delta[None, :] * (k_t * k_t)[:, None]) * lam
                    grad_state = grad_state * keeps_state(seq_idx, row, t, L, HAS_DOCUMENTS)
            tl.debug_barrier()  # the next block overwrites the scratch states
    summed = (row * num_splits + split) * channels + d
    if HAS_BIAS:
        tl.store(dbias_parts + summed, dbias, mask=is_channel)
    if HAS_SKIP:
        tl.store(dskip_parts + summed, dskip, mask=is_channel)
    if split == 0:
        tl.store(dinitial + row * size + d[None, :] * num_states + n[:, None], grad_state, mask=in_tile)
