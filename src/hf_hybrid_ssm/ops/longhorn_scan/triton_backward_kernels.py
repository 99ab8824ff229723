"""Triton kernels of the Longhorn scan's gradients; see `triton_kernels` for tiles, checkpoints and splits."""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import (
    INTERPRETING,
    exponential,
    kernel,
    load,
    program_coords,
    reciprocal,
    select_row,
    tokens_at,
)
from hf_hybrid_ssm.ops.longhorn_scan.triton_kernels import (
    broadcast_lanes,
    compute_delta,
    in_checkpoint,
    in_states,
    load_states,
    store_states,
)


@triton.jit
def summand(values, like):
    """Values that `sum_channels` adds up, rounded to what it multiplies where the pointer `like` is to bfloat16."""
    return values.to(tl.bfloat16) if like.dtype.element_ty == tl.bfloat16 else values


@triton.jit
def sum_channels(values, like, T: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """The sums over channels of values [T, S, BD, P], in all rows of a [16, T N], by tensor cores.

    A product with ones rounds the values: to bfloat16 where the pointer `like` is to bfloat16, to tf32's eleven bits
    where it is to float16; for float32 the rest is added, of which eleven bits count.
    """
    values = tl.reshape(tl.permute(values, (2, 0, 3, 1)), [BD, T * N])
    if INTERPRETING:  # which has no products of bfloat16
        values = values.to(tl.float32)
    ones = tl.full([16, BD], 1.0, values.dtype)
    if like.dtype.element_ty == tl.float32:
        high = (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        rest = tl.dot(ones, values - high, input_precision="tf32")
        return tl.dot(ones, high, rest, input_precision="tf32")
    else:
        return tl.dot(ones, values, input_precision="tf32")


@triton.jit
def on_lanes(shared, S: tl.constexpr, BD: tl.constexpr):
    """Keys or queries [T, S, P] for all channels."""
    return tl.broadcast_to(shared[:, :, None, :], [shared.shape[0], S, BD, shared.shape[2]])


@triton.jit
def token_lanes(numbers, T: tl.constexpr, BD: tl.constexpr, P: tl.constexpr):
    """A number of each token [T] for all channels and lanes."""
    return broadcast_lanes(tl.broadcast_to(numbers[:, None], [T, BD]), T, BD, P)


@triton.jit
def hold_states(
    signals, keys, norms, keeps, bias, own, own_at, own_count, h, row, block, num_blocks, d, channels, L,
    HAS_DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states before every T tokens of a block, from those before the block."""
    N: tl.constexpr = S * P
    SUBS: tl.constexpr = BLOCK // T
    t, is_channel, every = tl.arange(0, T), d < channels, d == d
    s3, t3, t4 = tl.arange(0, S)[:, None, None], t[:, None, None], t[:, None, None, None]
    in_keys = (t3 * P + tl.arange(0, P)[None, None, :]) * S + tl.arange(0, S)[None, :, None]
    for sub in tl.range(0, SUBS - 1, num_stages=STAGES):
        store_states(own + sub * (N * BD), own_at, BD, own_count, every, h, s3, S)
        first = block * BLOCK + sub * T + row * 0  # 64-bit
        shared = row * num_blocks * BLOCK + first
        real = (t < L - first)[:, None] & is_channel[None, :]
        x_t = tokens_at(signals[0], row, first, t[:, None], d, real)
        logit = tokens_at(signals[1], row, first, t[:, None], d, real)
        delta, _ = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
        key = on_lanes(tl.load(keys + shared * N + in_keys), S, BD)
        deltas, writes = broadcast_lanes(delta, T, BD, P), broadcast_lanes(delta * x_t, T, BD, P)
        if HAS_DOCUMENTS:
            keep = token_lanes(tl.load(keeps + shared + t), T, BD, P)
        for i in tl.static_range(T):
            k_i = select_row(key, t4, i)
            if HAS_DOCUMENTS:
                h = h * select_row(keep, t3, i)[None, :, :]
            h += k_i * (select_row(writes, t3, i)[None, :, :] - select_row(deltas, t3, i)[None, :, :] * k_i * h)
    store_states(own + (SUBS - 1) * (N * BD), own_at, BD, own_count, every, h, s3, S)


@triton.jit
def states_again(
    h, key, query, keep, deltas, writes, grads, x,
    HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of T tokens: Delta (x - k h) of the states that they meet, what the states give, and the summands of dq."""
    t = tl.arange(0, T)
    t3, t4 = t[:, None, None], t[:, None, None, None]
    errors = ()
    y = tl.zeros([T, BD, P], tl.float32)
    dq_t = tl.zeros([T, S, BD, P], x.dtype.element_ty if x.dtype.element_ty == tl.bfloat16 else tl.float32)
    for i in tl.static_range(T):
        k_i, q_i = select_row(key, t4, i), select_row(query, t4, i)
        if HAS_DOCUMENTS:
            h = h * select_row(keep, t3, i)[None, :, :]
        error = select_row(writes, t3, i)[None, :, :] - select_row(deltas, t3, i)[None, :, :] * k_i * h
        errors = errors + (error,)  # noqa: RUF005 - the compiler knows no unpacking
        h += k_i * error
        if HAS_GATE:
            y_i = tl.sum(h * q_i, 0)
            y = tl.where(t3 == i, y_i[None, :, :], y)
        dq_t = tl.where(t4 == i, summand(select_row(grads, t3, i)[None, :, :] * h, x)[None, :, :, :], dq_t)
    return errors, y, dq_t


@triton.jit
def gradients_back(
    grad, errors, key, query, keep, deltas, writes, grads, x,
    HAS_DOCUMENTS: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """From the gradient after T tokens that before them; of each token that of x and Delta, and the summands of dk."""
    t = tl.arange(0, T)
    t3, t4 = t[:, None, None], t[:, None, None, None]
    dk_t = tl.zeros([T, S, BD, P], x.dtype.element_ty if x.dtype.element_ty == tl.bfloat16 else tl.float32)
    recalled, ddelta = tl.zeros([T, BD, P], tl.float32), tl.zeros([T, BD, P], tl.float32)
    for i in tl.static_range(T - 1, -1, -1):
        k_i = select_row(key, t4, i)
        lam = grad + select_row(grads, t3, i)[None, :, :] * select_row(query, t4, i)
        lam_error = lam * errors[i]
        recalled = tl.where(t3 == i, tl.sum(lam * k_i, 0)[None, :, :], recalled)
        ddelta = tl.where(t3 == i, tl.sum(lam_error * k_i, 0)[None, :, :], ddelta)
        half_dk = lam_error - 0.5 * select_row(writes, t3, i)[None, :, :] * lam
        dk_t = tl.where(t4 == i, summand(half_dk, x)[None, :, :, :], dk_t)
        grad = lam * (1.0 - select_row(deltas, t3, i)[None, :, :] * (k_i * k_i))
        if HAS_DOCUMENTS:
            grad = grad * select_row(keep, t3, i)[None, :, :]
    return grad, tl.sum(recalled, 2), tl.sum(ddelta, 2), dk_t


@triton.jit
def token_gradients(
    grad, h, signals, keys, queries, norms, keeps, bias, through, outputs, shared_parts, row, first, shared, part,
    d, channels, L,
    HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """All gradients of T tokens that meet the states h; returns that before them, and parts of dbias and dskip.

    `outputs`: dx, dlogit, dz. `shared_parts`: of dq, dk and the gradient of |k|².
    """
    N: tl.constexpr = S * P
    x, t, is_channel = signals[0][0], tl.arange(0, T), d < channels
    in_keys = (t[:, None, None] * P + tl.arange(0, P)[None, None, :]) * S + tl.arange(0, S)[None, :, None]
    line = tl.arange(0, 16)[:, None]  # of equal sums
    in_parts = tl.arange(0, T * N)[None, :] + 0 * line
    real = (t < L - first)[:, None] & is_channel[None, :]
    x_t = tokens_at(signals[0], row, first, t[:, None], d, real)
    logit = tokens_at(signals[1], row, first, t[:, None], d, real)
    g_t = tokens_at(signals[3], row, first, t[:, None], d, real)
    key, query = tl.load(keys + shared * N + in_keys), tl.load(queries + shared * N + in_keys)
    delta, e = compute_delta(logit + bias, tl.load(norms + shared + t)[:, None])
    if HAS_GATE:
        z_t = tokens_at(signals[2], row, first, t[:, None], d, real)
        open_ = reciprocal(1.0 + exponential(-z_t))
        through_gate = g_t * open_ * (1.0 + z_t * (1.0 - open_))
        g_t = g_t * z_t * open_
    deltas, writes = broadcast_lanes(delta, T, BD, P), broadcast_lanes(delta * x_t, T, BD, P)
    grads, keep = broadcast_lanes(g_t, T, BD, P), 1.0
    if HAS_DOCUMENTS:
        keep = token_lanes(tl.load(keeps + shared + t), T, BD, P)
    errors, y, dq_t = states_again(
        h, on_lanes(key, S, BD), on_lanes(query, S, BD), keep, deltas, writes, grads, x,
        HAS_GATE, HAS_DOCUMENTS, T, S, P, BD,
    )  # fmt: skip
    tl.store(shared_parts[0] + part * N + in_parts, sum_channels(dq_t, x, T, N, BD), mask=line == 0)
    key = on_lanes(tl.load(keys + shared * N + in_keys), S, BD)  # once more: they would otherwise be kept in registers
    query = on_lanes(tl.load(queries + shared * N + in_keys), S, BD)
    grad, recalled, delta_ddelta, dk_t = gradients_back(
        grad, errors, key, query, keep, deltas, writes, grads, x, HAS_DOCUMENTS, T, S, P, BD
    )
    at = (row * L + first) * channels + (t[:, None] * channels + d[None, :])
    dlogit_t = delta_ddelta * delta * e
    tl.store(outputs[0] + at, g_t * through + delta * recalled, mask=real)
    tl.store(outputs[1] + at, dlogit_t, mask=real)
    if HAS_GATE:
        tl.store(outputs[2] + at, through_gate * (tl.sum(y, 2) + through * x_t), mask=real)
    tl.store(shared_parts[2] + part + t, tl.sum(delta * delta_ddelta, 1))
    tl.store(shared_parts[1] + part * N + in_parts, sum_channels(dk_t, x, T, N, BD), mask=line == 0)
    return grad, tl.sum(dlogit_t, 0), tl.sum(g_t * x_t, 0)


@kernel
def backward_kernel(
    x, beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, skip, checkpoints, grad_states, scratch,
    dx, dlogit, dz, dq_parts, dk_parts, norm_parts, dbias_parts, dskip_parts, dinitial,
    x_row, x_step, logit_row, logit_step, z_row, z_step, g_row, g_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    rows,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_GRAD_STATES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of one split of one row for BD channels, blocks of tokens from last to first.

    `grad` is what dL/dh_t gets from later tokens. Of dk, dq and the gradient of |k|², which are sums over channels,
    a program leaves its part, in `(tiles, B, tokens, N)`; `finish_kernel` adds them up in fixed order.
    """
    N: tl.constexpr = S * P
    SUBS: tl.constexpr = BLOCK // T
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d = tile * BD + tl.arange(0, BD)
    is_channel, size = d < channels, num_states * channels
    s3, p2 = tl.arange(0, S)[:, None, None], tl.arange(0, P)[None, :]
    signals = ((x, x_row, x_step), (beta_logit, logit_row, logit_step), (z, z_row, z_step), (grad_o, g_row, g_step))
    own = scratch + tl.program_id(0).to(tl.int64) * SUBS * N * BD
    own_at, own_count = tl.arange(0, BD)[:, None] * lane + p2 * (S * BD), p2 * 0 + S
    bias = load(beta_bias + d, is_channel) if HAS_BIAS else 0.0
    through = load(skip + d, is_channel) if HAS_SKIP else 0.0
    grad = tl.zeros([S, BD, P], tl.float32)
    if HAS_GRAD_STATES:
        entering = grad_states + (row * num_splits + split) * size
        entering_at, next_state, states_left = in_states(d, lane, num_states, P, S)
        grad = load_states(entering, entering_at, next_state, states_left, is_channel, s3, S)
    dbias, dskip = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    first_block, last_block = split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)
    for turn in range(0, last_block - first_block):
        block = last_block - 1 - turn
        here = checkpoints + (row * num_blocks + block) * tl.cdiv(channels, WIDTH) * num_states * WIDTH
        saved_at, next_saved, count = in_checkpoint(d, lane, num_states, P, S, WIDTH)
        h = load_states(here, saved_at, next_saved, count, is_channel, s3, S)
        hold_states(
            signals, keys, norms, keeps, bias, own, own_at, own_count, h, row, block, num_blocks, d, channels, L,
            HAS_DOCUMENTS, BLOCK, T, S, P, BD, STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # the lanes that read a state below may not be those that wrote it
        for back in tl.range(0, SUBS, num_stages=STAGES):
            sub = SUBS - 1 - back
            first = block * BLOCK + sub * T + row * 0  # 64-bit
            part = (tile.to(tl.int64) * rows + row) * num_blocks * BLOCK + first
            h = load_states(own + sub * (N * BD), own_at, BD, own_count, d == d, s3, S, P == 1)
            grad, dbias_t, dskip_t = token_gradients(
                grad, h, signals, keys, queries, norms, keeps, bias, through, (dx, dlogit, dz),
                (dq_parts, dk_parts, norm_parts), row, first, row * num_blocks * BLOCK + first, part, d, channels, L,
                HAS_GATE, HAS_DOCUMENTS, T, S, P, BD,
            )  # fmt: skip
            dbias += dbias_t
            dskip += dskip_t
        tl.debug_barrier()  # the next block overwrites the scratch states
    summed = (row * num_splits + split) * channels + d
    if HAS_BIAS:
        tl.store(dbias_parts + summed, dbias, mask=is_channel)
    if HAS_SKIP:
        tl.store(dskip_parts + summed, dskip, mask=is_channel)
    if split == 0:  # `lane` keeps the offsets from staying in registers since `grad_states` was read
        leaving_at, next_state, states_left = in_states(d, lane, num_states, P, S)
        store_states(dinitial + row * size, leaving_at, next_state, states_left, is_channel, grad, s3, S)


@kernel
def finish_kernel(
    dq_parts, dk_parts, norm_parts, keys, dq, dk, L, padded, num_states, tiles, parts, rows,
    T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq, dk (B, L, N): the sums of the parts, tile after tile; |k|² brings dk another -2 k."""
    tile, _, row = program_coords(tl.program_id(0), tiles, 1)
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
    tl.store(dk + to, 2.0 * (dk_t - key * norm_t[:, None]), mask=real)


@kernel
def backward_summary_kernel(
    beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, products, ends,
    logit_row, logit_step, z_row, z_step, g_row, g_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `forward_summary_kernel`, for the gradient that runs backwards through time."""
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d, t, wide = tile * BD + tl.arange(0, BD), tl.arange(0, T), row * 0  # makes what it is added to 64-bit
    is_channel = d < channels
    s3, t3, t4 = tl.arange(0, S)[:, None, None], t[:, None, None], t[:, None, None, None]
    in_keys = (t3 * P + tl.arange(0, P)[None, None, :]) * S + tl.arange(0, S)[None, :, None]
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
        deltas, grads = broadcast_lanes(delta, T, BD, P), broadcast_lanes(g_t, T, BD, P)
        if HAS_DOCUMENTS:
            keep = broadcast_lanes(tl.broadcast_to(tl.load(keeps + shared + t)[:, None], [T, BD]), T, BD, P)
        for i in tl.static_range(T - 1, -1, -1):
            k_i = select_row(key, t4, i)
            decay = 1.0 - select_row(deltas, t3, i)[None, :, :] * k_i * k_i
            if HAS_DOCUMENTS:
                decay = decay * select_row(keep, t3, i)[None, :, :]
            grad = decay * (grad + select_row(grads, t3, i)[None, :, :] * select_row(query, t4, i))
            product = product * decay
    at, next_state, count = in_states(d, lane, num_states, P, S)
    here = (row * num_splits + split) * num_states * channels
    store_states(products + here, at, next_state, count, is_channel, product, s3, S)
    store_states(ends + here, at, next_state, count, is_channel, grad, s3, S)
