"""Triton kernels of the Longhorn scan's gradients; see `triton_kernels` for tiles, checkpoints and splits."""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops._core.triton_helpers import exponential, load, reciprocal
from hf_hybrid_ssm.ops.longhorn_scan.triton_kernels import (
    STRIDES,
    compute_delta,
    dot_states,
    in_checkpoint,
    pick,
    place,
    spread,
)


@triton.jit
def sum_channels(values, total, column: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, PRECISE: tl.constexpr):
    """Puts the sums over channels of values [S, BD, P] into a column of total [N, 16], by tensor cores.

    A product with ones rounds a value to tf32's eleven bits; PRECISE adds the rest, of which eleven bits count.
    """
    values = tl.reshape(tl.permute(values, (0, 2, 1)), [N, BD])
    ones = tl.full([BD, 16], 1.0, tl.float32)
    if PRECISE:
        high = (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        rest = tl.dot(values - high, ones, input_precision="tf32")
        sums = tl.dot(high, ones, rest, input_precision="tf32")
    else:
        sums = tl.dot(values, ones, input_precision="tf32")
    return tl.where(tl.arange(0, 16)[None, :] == column, sums, total)


@triton.jit(do_not_specialize=STRIDES)
def backward_kernel(
    x, beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, skip, checkpoints, grad_states, scratch,
    dx, dlogit, dz, dq_parts, dk_parts, norm_parts, dbias_parts, dskip_parts, dinitial,
    x_row, x_step, logit_row, logit_step, z_row, z_step, g_row, g_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, state_d, state_n, lane,
    rows,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_GRAD_STATES: tl.constexpr, PRECISE: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of one split of one row for BD channels, blocks of tokens from last to first.

    `grad` is what dL/dh_t gets from later tokens. Of dk, dq and the gradient of |k|², which are sums over channels,
    a program leaves its part, in `(tiles, B, tokens, N)`; `finish_kernel` adds them up in fixed order.
    """
    N: tl.constexpr = S * P
    SUBS: tl.constexpr = BLOCK // T
    tile, split, row = place(tl.program_id(0), tiles, num_splits)
    d, t, wide = tile * BD + tl.arange(0, BD), tl.arange(0, T), row * 0  # makes what it is added to 64-bit
    is_channel = d < channels
    s3, p3 = tl.arange(0, S)[:, None, None], tl.arange(0, P)[None, None, :]
    n3, d3, t3, t4 = p3 * S + s3, d[None, :, None], t[:, None, None], t[:, None, None, None]
    in_tile, size = (n3 < num_states) & (d3 < channels), num_states * channels
    in_keys = (t3 * P + p3) * S + tl.arange(0, S)[None, :, None]
    own = scratch + tl.program_id(0).to(tl.int64) * SUBS * N * BD
    own_tile = tl.arange(0, BD)[None, :, None] * lane + n3 * BD
    line, column = tl.arange(0, N)[:, None], tl.arange(0, 16)[None, :]
    in_parts = (column % T) * N + (line % P) * S + line // P
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    through = load(skip + d, is_channel) if HAS_SKIP else 0.0
    grad = tl.zeros([S, BD, P], tl.float32)
    if HAS_GRAD_STATES:
        entering = grad_states + (row * num_splits + split) * size
        grad = tl.load(entering + (d3 * state_d + n3 * state_n), mask=in_tile, other=0.0)
    dbias, dskip = tl.zeros([T, BD], tl.float32), tl.zeros([T, BD], tl.float32)
    first_block, last_block = split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)
    for turn in range(0, last_block - first_block):
        block = last_block - 1 - turn
        here = checkpoints + (row * num_blocks + block) * tl.cdiv(channels, WIDTH) * num_states * WIDTH
        h = tl.load(here + in_checkpoint(d3, n3, num_states, lane, WIDTH), mask=in_tile, other=0.0)
        for sub in tl.range(0, SUBS - 1, num_stages=STAGES):
            tl.store(own + sub * (N * BD) + own_tile, h)
            first = block * BLOCK + sub * T + wide
            shared = row * num_blocks * BLOCK + first
            real = (t < L - first)[:, None] & is_channel[None, :]
            x_t = load(x + row * x_row + first * x_step + (t[:, None] * x_step + d[None, :]), real)
            logit = load(
                beta_logit + row * logit_row + first * logit_step + (t[:, None] * logit_step + d[None, :]), real
            )
            delta, _ = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
            key = tl.broadcast_to(tl.load(keys + shared * N + in_keys)[:, :, None, :], [T, S, BD, P])
            deltas, writes = spread(delta, T, BD, P), spread(delta * x_t, T, BD, P)
            if HAS_DOCUMENTS:
                keep = spread(tl.broadcast_to(tl.load(keeps + shared + t)[:, None], [T, BD]), T, BD, P)
            for i in tl.static_range(T):
                k_i = pick(key, t4, i)
                if HAS_DOCUMENTS:
                    h = h * pick(keep, t3, i)[None, :, :]
                h += k_i * (pick(writes, t3, i)[None, :, :] - pick(deltas, t3, i)[None, :, :] * k_i * h)
        tl.store(own + (SUBS - 1) * (N * BD) + own_tile, h)
        tl.debug_barrier()  # the lanes that read a state below may not be those that wrote it
        for back in tl.range(0, SUBS, num_stages=STAGES):
            sub = SUBS - 1 - back
            first = block * BLOCK + sub * T + wide
            shared = row * num_blocks * BLOCK + first
            real = (t < L - first)[:, None] & is_channel[None, :]
            x_t = load(x + row * x_row + first * x_step + (t[:, None] * x_step + d[None, :]), real)
            logit = load(
                beta_logit + row * logit_row + first * logit_step + (t[:, None] * logit_step + d[None, :]), real
            )
            g_t = load(grad_o + row * g_row + first * g_step + (t[:, None] * g_step + d[None, :]), real)
            key, query = tl.load(keys + shared * N + in_keys), tl.load(queries + shared * N + in_keys)
            h = tl.load(own + sub * (N * BD) + own_tile)
            delta, e = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
            if HAS_GATE:
                z_t = load(z + row * z_row + first * z_step + (t[:, None] * z_step + d[None, :]), real)
                open_ = reciprocal(1.0 + exponential(-z_t))
                through_gate = g_t * open_ * (1.0 + z_t * (1.0 - open_))
                g_t = g_t * z_t * open_
            key, query = (
                tl.broadcast_to(key[:, :, None, :], [T, S, BD, P]),
                tl.broadcast_to(query[:, :, None, :], [T, S, BD, P]),
            )
            deltas, writes, grads = spread(delta, T, BD, P), spread(delta * x_t, T, BD, P), spread(g_t, T, BD, P)
            if HAS_DOCUMENTS:
                keep = spread(tl.broadcast_to(tl.load(keeps + shared + t)[:, None], [T, BD]), T, BD, P)
            before = ()  # the states that the tokens meet
            after = ()
            for i in tl.static_range(T):
                k_i = pick(key, t4, i)
                if HAS_DOCUMENTS:
                    h = h * pick(keep, t3, i)[None, :, :]
                before = before + (h,)  # type: ignore[assignment]  # noqa: RUF005 - the compiler knows no unpacking
                h += k_i * (pick(writes, t3, i)[None, :, :] - pick(deltas, t3, i)[None, :, :] * k_i * h)
                after = after + (h,)  # type: ignore[assignment]  # noqa: RUF005
            y = tl.zeros([T, BD, P], tl.float32)
            recalled = tl.zeros([T, BD, P], tl.float32)
            ddelta = tl.zeros([T, BD, P], tl.float32)
            sums = tl.zeros([N, 16], tl.float32)  # a column for dq and one for dk of each token
            for i in tl.static_range(T - 1, -1, -1):
                k_i, q_i = pick(key, t4, i), pick(query, t4, i)
                g_i = pick(grads, t3, i)[None, :, :]
                delta_k = pick(deltas, t3, i)[None, :, :] * k_i
                error = pick(writes, t3, i)[None, :, :] - delta_k * before[i]  # Delta (x - k h)
                lam = grad + g_i * q_i
                lam_k = lam * k_i
                zero = tl.zeros([BD, P], tl.float32)
                if HAS_GATE:
                    y = tl.where(t3 == i, dot_states(after[i], q_i, s3, zero, S)[None, :, :], y)
                recalled = tl.where(t3 == i, dot_states(lam, k_i, s3, zero, S)[None, :, :], recalled)
                ddelta = tl.where(t3 == i, dot_states(lam_k, error, s3, zero, S)[None, :, :], ddelta)
                sums = sum_channels(g_i * after[i], sums, i, N, BD, PRECISE)
                sums = sum_channels(lam * (error - delta_k * before[i]), sums, T + i, N, BD, PRECISE)
                grad = lam - delta_k * lam_k
                if HAS_DOCUMENTS:
                    grad = grad * pick(keep, t3, i)[None, :, :]
            at = (row * L + first) * channels + (t[:, None] * channels + d[None, :])
            delta_ddelta = tl.sum(ddelta, 2)
            dlogit_t = delta_ddelta * delta * e
            tl.store(dx + at, g_t * through + delta * tl.sum(recalled, 2), mask=real)
            tl.store(dlogit + at, dlogit_t, mask=real)
            if HAS_GATE:
                tl.store(dz + at, through_gate * (tl.sum(y, 2) + through * x_t), mask=real)
            dbias += dlogit_t
            dskip += g_t * x_t
            part = (tile.to(tl.int64) * rows + row) * num_blocks * BLOCK + first
            tl.store(norm_parts + part + t, tl.sum(delta * delta_ddelta, 1))
            tl.store(dq_parts + part * N + in_parts, sums, mask=(column < T) & (line < N))
            tl.store(dk_parts + part * N + in_parts, sums, mask=(column >= T) & (column < 2 * T) & (line < N))
        tl.debug_barrier()  # the next block overwrites the scratch states
    summed = (row * num_splits + split) * channels + d
    if HAS_BIAS:
        tl.store(dbias_parts + summed, tl.sum(dbias, 0), mask=is_channel)
    if HAS_SKIP:
        tl.store(dskip_parts + summed, tl.sum(dskip, 0), mask=is_channel)
    if split == 0:
        tl.store(dinitial + row * size + (d3 * state_d + n3 * state_n), grad, mask=in_tile)


@triton.jit
def finish_kernel(
    dq_parts, dk_parts, norm_parts, keys, dq, dk, L, padded, num_states, tiles, parts, rows,
    T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq, dk (B, L, N): the sums of the parts, tile after tile; |k|² brings dk another -2 k."""
    tile, _, row = place(tl.program_id(0), tiles, 1)
    t, n = tile * T + row * 0 + tl.arange(0, T), tl.arange(0, BN)
    inside = t < padded
    dq_t, dk_t = tl.zeros([T, BN], tl.float32), tl.zeros([T, BN], tl.float32)
    norm_t = tl.zeros([T], tl.float32)
    for part in tl.range(0, parts, num_stages=4):
        at = (part * rows + row) * padded + t
        in_part = at[:, None] * BN + n[None, :]
        dq_t += load(dq_parts + in_part, inside[:, None])
        dk_t += load(dk_parts + in_part, inside[:, None])
        norm_t += load(norm_parts + at, inside)
    key = load(keys + (row * padded + t)[:, None] * BN + n[None, :], inside[:, None])
    real = (t < L)[:, None] & (n < num_states)[None, :]
    to = (row * L + t)[:, None] * num_states + n[None, :]
    tl.store(dq + to, dq_t, mask=real)
    tl.store(dk + to, dk_t - 2.0 * key * norm_t[:, None], mask=real)


@triton.jit(do_not_specialize=STRIDES)
def backward_summary_kernel(
    beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, products, ends,
    logit_row, logit_step, z_row, z_step, g_row, g_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, state_d, state_n,
    HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `forward_summary_kernel`, for the gradient that runs backwards through time."""
    tile, split, row = place(tl.program_id(0), tiles, num_splits)
    d, t, wide = tile * BD + tl.arange(0, BD), tl.arange(0, T), row * 0  # makes what it is added to 64-bit
    is_channel = d < channels
    s3, p3 = tl.arange(0, S)[:, None, None], tl.arange(0, P)[None, None, :]
    n3, d3, t3, t4 = p3 * S + s3, d[None, :, None], t[:, None, None], t[:, None, None, None]
    in_keys = (t3 * P + p3) * S + tl.arange(0, S)[None, :, None]
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    grad = tl.zeros([S, BD, P], tl.float32)
    product = tl.full([S, BD, P], 1.0, tl.float32)
    begin = split * blocks_per_split * (BLOCK // T)
    end = tl.minimum((split + 1) * blocks_per_split, num_blocks) * (BLOCK // T)
    for turn in tl.range(0, end - begin, num_stages=STAGES):
        first = (end - 1 - turn) * T + wide
        shared = row * num_blocks * BLOCK + first
        real = (t < L - first)[:, None] & is_channel[None, :]
        logit = load(beta_logit + row * logit_row + first * logit_step + (t[:, None] * logit_step + d[None, :]), real)
        g_t = load(grad_o + row * g_row + first * g_step + (t[:, None] * g_step + d[None, :]), real)
        key, query = tl.load(keys + shared * (S * P) + in_keys), tl.load(queries + shared * (S * P) + in_keys)
        if HAS_GATE:
            z_t = load(z + row * z_row + first * z_step + (t[:, None] * z_step + d[None, :]), real)
            g_t = g_t * z_t * reciprocal(1.0 + exponential(-z_t))
        delta, _ = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
        key, query = (
            tl.broadcast_to(key[:, :, None, :], [T, S, BD, P]),
            tl.broadcast_to(query[:, :, None, :], [T, S, BD, P]),
        )
        deltas, grads = spread(delta, T, BD, P), spread(g_t, T, BD, P)
        if HAS_DOCUMENTS:
            keep = spread(tl.broadcast_to(tl.load(keeps + shared + t)[:, None], [T, BD]), T, BD, P)
        for i in tl.static_range(T - 1, -1, -1):
            k_i = pick(key, t4, i)
            decay = 1.0 - pick(deltas, t3, i)[None, :, :] * k_i * k_i
            if HAS_DOCUMENTS:
                decay = decay * pick(keep, t3, i)[None, :, :]
            grad = decay * (grad + pick(grads, t3, i)[None, :, :] * pick(query, t4, i))
            product = product * decay
    in_tile, size = (n3 < num_states) & (d3 < channels), num_states * channels
    here = (row * num_splits + split) * size + (d3 * state_d + n3 * state_n)
    tl.store(products + here, product, mask=in_tile)
    tl.store(ends + here, grad, mask=in_tile)
