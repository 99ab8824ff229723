"""Triton kernels of the scan of channels with states of their own: one for each pass over the tokens.

A program walks through a whole row with one filter of BD channels, whose states [BN, BD] stay in registers; tokens are
fetched `GROUP` ahead, so that their loads are under way while the states advance. Numbers are pairs of tensors, real
and imaginary parts (`COMPLEX`), or one. Decays come in float64: the recurrence runs in float32, and after every
T = 2^BITS tokens what the rounding of the decay did to the state they began with is put right.
"""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import kernel


@triton.jit
def times(ar, ai, br, bi, COMPLEX: tl.constexpr):
    if COMPLEX:
        return ar * br - ai * bi, ar * bi + ai * br
    else:
        return ar * br, bi


@triton.jit
def block_power(ar, ai, BITS: tl.constexpr, COMPLEX: tl.constexpr):
    """a^T and a^(T - 1) for T = 2^BITS."""
    less_r, less_i = ar * 0.0 + 1.0, ai * 0.0
    for _ in tl.static_range(BITS):
        less_r, less_i = times(less_r, less_i, ar, ai, COMPLEX)
        ar, ai = times(ar, ai, ar, ai, COMPLEX)
    return ar, ai, less_r, less_i


@triton.jit
def drifts(ar, ai, BITS: tl.constexpr, COMPLEX: tl.constexpr):
    """What T = 2^BITS steps of the decay rounded to float32 leave out, of a state and of its derivative."""
    pr, pi, lr, li = block_power(ar, ai, BITS, COMPLEX)
    rr, ri = ar.to(tl.float32).to(tl.float64), ai.to(tl.float32).to(tl.float64)
    qr, qi, mr, mi = block_power(rr, ri, BITS, COMPLEX)
    T: tl.constexpr = 1 << BITS
    dr, di, er, ei = pr - qr, pi - qi, T * (lr - mr), T * (li - mi)
    return dr.to(tl.float32), di.to(tl.float32), er.to(tl.float32), ei.to(tl.float32)


@triton.jit
def load_number(pointers, mask, COMPLEX: tl.constexpr):
    """Real and imaginary part, 0 where there is nothing to be read."""
    real = tl.load(pointers, mask=mask, other=0.0)
    if COMPLEX:
        return real, tl.load(pointers + 1, mask=mask, other=0.0)
    else:
        return real, real * 0.0


@triton.jit
def store_number(pointers, real, imaginary, mask, COMPLEX: tl.constexpr):
    tl.store(pointers, real, mask=mask)
    if COMPLEX:
        tl.store(pointers + 1, imaginary, mask=mask)


@triton.jit
def put_right(r, i, start_r, start_i, drift_r, drift_i, intact, COMPLEX: tl.constexpr):
    """A state with what T steps of the rounded decay left out, of the state they began with."""
    moved_r, moved_i = times(drift_r, drift_i, start_r, start_i, COMPLEX)
    r += intact * moved_r
    if COMPLEX:
        i += intact * moved_i
    return r, i


@triton.jit
def place(channels, filters, num_states, BN: tl.constexpr, BD: tl.constexpr, COMPLEX: tl.constexpr):
    """Row, filter and channels of a program, which of its numbers there are, and where they lie: those of the system
    in (F, D, N), states in (B, F, D, N)."""
    tiles = tl.cdiv(channels, BD)
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    f, row = rest % filters, (rest // filters).to(tl.int64)
    d, n = tile * BD + tl.arange(0, BD), tl.arange(0, BN)
    in_tile = (n < num_states)[:, None] & (d < channels)[None, :]
    WIDTH: tl.constexpr = 2 if COMPLEX else 1
    system = (((f * channels + d)[None, :]) * num_states + n[:, None]) * WIDTH
    state = (((row * filters + f) * channels + d)[None, :] * num_states + n[:, None]) * WIDTH
    return row, f, d, in_tile, system, state


@triton.jit
def fetch(signal, weight, seq_idx, places, q, end, d, channels,
          BACKWARDS: tl.constexpr, WEIGHED: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """Token number q of the walk: its signal, its weight, and 1.0 where it goes on with the document of the last.

    `places`: offset and step over tokens of the signal, then of the weight.
    """
    t = end - 1 - q if BACKWARDS else q
    inside = d < tl.where(q < end, channels, 0)
    x = tl.load(signal + places[0] + t.to(tl.int64) * places[1], mask=inside, other=0.0).to(tl.float32)
    w = x
    if WEIGHED:
        w = tl.load(weight + places[2] + t.to(tl.int64) * places[3], mask=inside, other=0.0).to(tl.float32)
    keep = 1.0
    if DOCUMENTS:
        last = t + 1 if BACKWARDS else t - 1
        has_last = tl.where(q < end, q, 0) > 0
        here = tl.load(seq_idx + t, mask=has_last, other=0)
        keep = tl.where(here == tl.load(seq_idx + last, mask=has_last, other=0), 1.0, 0.0)
    return x, w, keep


@triton.jit
def fetch_first(signal, weight, seq_idx, places, end, d, channels,
                BACKWARDS: tl.constexpr, WEIGHED: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """The four tokens that the walk begins with."""
    none = end * 0
    t0 = fetch(signal, weight, seq_idx, places, none, end, d, channels, BACKWARDS, WEIGHED, DOCUMENTS)
    t1 = fetch(signal, weight, seq_idx, places, none + 1, end, d, channels, BACKWARDS, WEIGHED, DOCUMENTS)
    t2 = fetch(signal, weight, seq_idx, places, none + 2, end, d, channels, BACKWARDS, WEIGHED, DOCUMENTS)
    t3 = fetch(signal, weight, seq_idx, places, none + 3, end, d, channels, BACKWARDS, WEIGHED, DOCUMENTS)
    return t0, t1, t2, t3


@kernel
def channel_forward_kernel(
    signal, decay, entering, reading, skip, seq_idx, lengths, start, out, final,
    s_row, s_step, L, channels, filters, num_states,
    COMPLEX: tl.constexpr, DOCUMENTS: tl.constexpr, LENGTHS: tl.constexpr, START: tl.constexpr, SKIP: tl.constexpr,
    BITS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """s_t = A s_{t-1} + B u_t, y_t = C s_t + D u_t."""
    row, f, d, in_tile, system, state = place(channels, filters, num_states, BN, BD, COMPLEX)
    ar, ai = load_number(decay + system, in_tile, COMPLEX)
    br, bi = load_number(entering + system, in_tile, COMPLEX)
    cr, ci = load_number(reading + system, in_tile, COMPLEX)
    r, i = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    if START:
        r, i = load_number(start + state, in_tile, COMPLEX)
    dr, di, _, _ = drifts(ar, ai, BITS, COMPLEX)
    ar, ai = ar.to(tl.float32), ai.to(tl.float32)
    is_channel = d < channels
    through = tl.load(skip + f * channels + d, mask=is_channel, other=0.0) if SKIP else tl.zeros([BD], tl.float32)
    end = tl.load(lengths + row).to(tl.int32) if LENGTHS else L
    documents = seq_idx + row * L if DOCUMENTS else seq_idx
    places = (row * s_row + d, s_step)
    target = (row * L * filters + f) * channels + d
    T: tl.constexpr = 1 << BITS
    GROUP: tl.constexpr = 4
    t0, t1, t2, t3 = fetch_first(signal, None, documents, places, end, d, channels, False, False, DOCUMENTS)
    for begin in range(0, end, T):
        start_r, start_i, intact = r, i, 1.0
        for group in range(0, T // GROUP):
            for member in tl.static_range(GROUP):
                q = begin + group * GROUP + member
                x, _w, keep = t0
                t0, t1, t2 = t1, t2, t3
                t3 = fetch(signal, None, documents, places, q + GROUP, end, d, channels, False, False, DOCUMENTS)
                alive = q < end
                intact *= tl.where(alive, keep, 0.0)
                if DOCUMENTS:
                    r, i = r * keep, i * keep
                before_r, before_i = r, i
                r, i = times(ar, ai, r, i, COMPLEX)
                r += br * x[None, :]
                if COMPLEX:
                    i += bi * x[None, :]
                y = tl.sum(cr * r + ci * i, 0) if COMPLEX else tl.sum(cr * r, 0)
                tl.store(out + target + q.to(tl.int64) * filters * channels, y + through * x,
                         mask=d < tl.where(alive, channels, 0))  # fmt: skip
                r, i = tl.where(alive, r, before_r), tl.where(alive, i, before_i)
        r, i = put_right(r, i, start_r, start_i, dr, di, intact, COMPLEX)
    store_number(final + state, r, i, in_tile, COMPLEX)


@kernel
def channel_derivative_kernel(
    signal, weight, decay, entering, reading, seq_idx, lengths, start, final_grad, sums, more_sums,
    s_row, s_step, w_row, w_step, w_filter, L, channels, filters, num_states,
    COMPLEX: tl.constexpr, DOCUMENTS: tl.constexpr, LENGTHS: tl.constexpr, START: tl.constexpr,
    BITS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Sums over time of s and of its derivative by a, times the weight: they give the gradients of C and of a."""
    row, f, d, in_tile, system, state = place(channels, filters, num_states, BN, BD, COMPLEX)
    ar, ai = load_number(decay + system, in_tile, COMPLEX)
    br, bi = load_number(entering + system, in_tile, COMPLEX)
    cr, ci = load_number(reading + system, in_tile, COMPLEX)
    r, i = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    if START:
        r, i = load_number(start + state, in_tile, COMPLEX)
    dr, di, er, ei = drifts(ar, ai, BITS, COMPLEX)
    ar, ai = ar.to(tl.float32), ai.to(tl.float32)
    pr, pi, sr, si, qr, qi = r * 0.0, r * 0.0, r * 0.0, r * 0.0, r * 0.0, r * 0.0
    end = tl.load(lengths + row).to(tl.int32) if LENGTHS else L
    documents = seq_idx + row * L if DOCUMENTS else seq_idx
    places = (row * s_row + d, s_step, row * w_row + f * w_filter + d, w_step)
    T: tl.constexpr = 1 << BITS
    GROUP: tl.constexpr = 4
    t0, t1, t2, t3 = fetch_first(signal, weight, documents, places, end, d, channels, False, True, DOCUMENTS)
    for begin in range(0, end, T):
        start_r, start_i, start_pr, start_pi, intact = r, i, pr, pi, 1.0
        for group in range(0, T // GROUP):
            for member in tl.static_range(GROUP):
                q = begin + group * GROUP + member
                x, w, keep = t0
                t0, t1, t2 = t1, t2, t3
                t3 = fetch(signal, weight, documents, places, q + GROUP, end, d, channels, False, True, DOCUMENTS)
                alive = q < end
                intact *= tl.where(alive, keep, 0.0)
                if DOCUMENTS:
                    r, i, pr, pi = r * keep, i * keep, pr * keep, pi * keep
                before_r, before_i = r, i
                next_r, next_i = times(ar, ai, pr, pi, COMPLEX)
                pr, pi = tl.where(alive, next_r + r, pr), tl.where(alive, next_i + i, pi)
                r, i = times(ar, ai, r, i, COMPLEX)
                r += br * x[None, :]
                if COMPLEX:
                    i += bi * x[None, :]
                sr += r * w[None, :]
                si += i * w[None, :]
                qr += pr * w[None, :]
                qi += pi * w[None, :]
                r, i = tl.where(alive, r, before_r), tl.where(alive, i, before_i)
        r, i = put_right(r, i, start_r, start_i, dr, di, intact, COMPLEX)
        moved_r, moved_i = times(dr, di, start_pr, start_pi, COMPLEX)
        more_r, more_i = times(er, ei, start_r, start_i, COMPLEX)
        pr += intact * (moved_r + more_r)
        if COMPLEX:
            pi += intact * (moved_i + more_i)
    zr, zi = load_number(final_grad + state, in_tile, COMPLEX)
    of_decay = cr * qr + zr * pr
    if COMPLEX:
        of_decay += ci * qi + zi * pi
    store_number(more_sums + state, of_decay, ci * qr - cr * qi + zi * pr - zr * pi, in_tile, COMPLEX)
    store_number(sums + state, sr, si, in_tile, COMPLEX)


@kernel
def channel_backward_kernel(
    signal, weight, decay, entering, reading, skip, seq_idx, lengths, start, out, final, sums, dskip,
    s_row, s_step, s_filter, w_row, w_step, L, channels, filters, num_states,
    COMPLEX: tl.constexpr, DOCUMENTS: tl.constexpr, LENGTHS: tl.constexpr, START: tl.constexpr, SKIP: tl.constexpr,
    BITS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The same recurrence backwards in time, with a's conjugate, from the outputs' gradients to the inputs': what
    enters is C, what is read out B. The states' sums over time, times the weight, give the gradient of B."""
    row, f, d, in_tile, system, state = place(channels, filters, num_states, BN, BD, COMPLEX)
    ar, ai = load_number(decay + system, in_tile, COMPLEX)
    br, bi = load_number(entering + system, in_tile, COMPLEX)
    cr, ci = load_number(reading + system, in_tile, COMPLEX)
    r, i = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BD], tl.float32)
    if START:
        r, i = load_number(start + state, in_tile, COMPLEX)
    ai = -ai
    dr, di, _, _ = drifts(ar, ai, BITS, COMPLEX)
    ar, ai = ar.to(tl.float32), ai.to(tl.float32)
    is_channel = d < channels
    through = tl.load(skip + f * channels + d, mask=is_channel, other=0.0) if SKIP else tl.zeros([BD], tl.float32)
    sr, si, skip_sum = r * 0.0, r * 0.0, tl.zeros([BD], tl.float32)
    end = tl.load(lengths + row).to(tl.int32) if LENGTHS else L
    documents = seq_idx + row * L if DOCUMENTS else seq_idx
    places = (row * s_row + f * s_filter + d, s_step, row * w_row + d, w_step)
    target = (row * L * filters + f) * channels + d
    T: tl.constexpr = 1 << BITS
    GROUP: tl.constexpr = 4
    t0, t1, t2, t3 = fetch_first(signal, weight, documents, places, end, d, channels, True, True, DOCUMENTS)
    for begin in range(0, end, T):
        start_r, start_i, intact = r, i, 1.0
        for group in range(0, T // GROUP):
            for member in tl.static_range(GROUP):
                q = begin + group * GROUP + member
                x, w, keep = t0
                t0, t1, t2 = t1, t2, t3
                t3 = fetch(signal, weight, documents, places, q + GROUP, end, d, channels, True, True, DOCUMENTS)
                alive = q < end
                intact *= tl.where(alive, keep, 0.0)
                if DOCUMENTS:
                    r, i = r * keep, i * keep
                before_r, before_i = r, i
                r += br * x[None, :]
                if COMPLEX:
                    i += bi * x[None, :]
                y = tl.sum(cr * r + ci * i, 0) if COMPLEX else tl.sum(cr * r, 0)
                tl.store(out + target + (end - 1 - q).to(tl.int64) * filters * channels, y + through * x,
                         mask=d < tl.where(alive, channels, 0))  # fmt: skip
                sr += r * w[None, :]
                si += i * w[None, :]
                skip_sum += x * w
                r, i = times(ar, ai, r, i, COMPLEX)
                r, i = tl.where(alive, r, before_r), tl.where(alive, i, before_i)
        r, i = put_right(r, i, start_r, start_i, dr, di, intact, COMPLEX)
    store_number(final + state, r, i, in_tile, COMPLEX)
    store_number(sums + state, sr, si, in_tile, COMPLEX)
    tl.store(dskip + (row * filters + f) * channels + d, skip_sum, mask=is_channel)
