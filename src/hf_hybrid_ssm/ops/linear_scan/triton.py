"""The CUDA backend of both scans for diagonal transitions: Triton kernels, and their launches.

Each pass over the tokens is one launch. A program walks through a whole row, so that the time is at least that of a
row's tokens one after the other: states stay in registers, and tokens are fetched a group of four ahead, so that their
loads are under way while the states advance. Numbers are pairs of tensors, real and imaginary parts (`COMPLEX`), or
one. Decays come in float64: the recurrence runs in float32, and after every T = 2^BITS tokens what the rounding of the
decay did to the state they began with is put right.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_hybrid_ssm.ops.core.triton_helpers import device_guard, kernel, supports
from hf_hybrid_ssm.ops.linear_scan.custom_ops import channel_op, diagonal_op, diagonal_scan_by, lti_scan_by

__all__ = ["diagonal_scan_triton", "lti_scan_triton", "supports"]

FORWARD, DERIVATIVE, BACKWARD = range(3)
BLOCK = {"BITS": 5}  # 32 tokens
DIAGONAL_TILE = {"BD": 32, "num_warps": 1, **BLOCK}


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
def fetch(signal, weight, seq_idx, offset, weight_offset, t, q, end, step, weight_step, d, channels,
          BACKWARDS: tl.constexpr, WEIGHED: tl.constexpr, DOCUMENTS: tl.constexpr):  # fmt: skip
    """Token number q of the walk: its signal, its weight, and 1.0 where it goes on with the document of the last."""
    inside = d < tl.where(q < end, channels, 0)
    x = tl.load(signal + offset + t.to(tl.int64) * step, mask=inside, other=0.0).to(tl.float32)
    w = x
    if WEIGHED:
        w = tl.load(weight + weight_offset + t.to(tl.int64) * weight_step, mask=inside, other=0.0).to(tl.float32)
    keep = 1.0
    if DOCUMENTS:
        last = t + 1 if BACKWARDS else t - 1
        has_last = tl.where(q < end, q, 0) > 0
        here = tl.load(seq_idx + t, mask=has_last, other=0)
        keep = tl.where(here == tl.load(seq_idx + last, mask=has_last, other=0), 1.0, 0.0)
    return x, w, keep


@kernel
def channel_kernel(
    signal, weight, decay, entering, reading, skip, seq_idx, lengths, start, final_grad, out, final, sums, more_sums,
    dskip, s_row, s_step, s_filter, w_row, w_step, w_filter, L, channels, filters, num_states,
    PASS: tl.constexpr, COMPLEX: tl.constexpr, DOCUMENTS: tl.constexpr, LENGTHS: tl.constexpr, START: tl.constexpr,
    SKIP: tl.constexpr, BITS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A row through one filter of BD channels, states [BN, BD]; passes as in native.c.

    PASS 0: y = C s + D u. PASS 1: sums over time of s and its derivative by a times the weight, which give the
    gradients of C and a. PASS 2: the same recurrence backwards in time, from the outputs' gradients to the inputs'.
    """
    tiles = tl.cdiv(channels, BD)
    tile, place = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    f, row = place % filters, (place // filters).to(tl.int64)
    d, n = tile * BD + tl.arange(0, BD), tl.arange(0, BN)
    is_channel = d < channels
    in_tile = (n < num_states)[:, None] & is_channel[None, :]
    WIDTH: tl.constexpr = 2 if COMPLEX else 1
    system = (((f * channels + d)[None, :]) * num_states + n[:, None]) * WIDTH
    state = (((row * filters + f) * channels + d)[None, :] * num_states + n[:, None]) * WIDTH
    ar = tl.load(decay + system, mask=in_tile, other=0.0)
    br = tl.load(entering + system, mask=in_tile, other=0.0)
    cr = tl.load(reading + system, mask=in_tile, other=0.0)
    r = tl.zeros([BN, BD], tl.float32)
    if START:
        r = tl.load(start + state, mask=in_tile, other=0.0)
    ai, bi, ci, i = ar * 0.0, br * 0.0, cr * 0.0, r * 0.0
    if COMPLEX:
        ai = tl.load(decay + system + 1, mask=in_tile, other=0.0)
        bi = tl.load(entering + system + 1, mask=in_tile, other=0.0)
        ci = tl.load(reading + system + 1, mask=in_tile, other=0.0)
        if START:
            i = tl.load(start + state + 1, mask=in_tile, other=0.0)
    if PASS == 2:
        ai = -ai
    dr, di, er, ei = drifts(ar, ai, BITS, COMPLEX)
    ar, ai = ar.to(tl.float32), ai.to(tl.float32)
    through = tl.load(skip + f * channels + d, mask=is_channel, other=0.0) if SKIP else tl.zeros([BD], tl.float32)
    pr, pi, sr, si, qr, qi = r * 0.0, r * 0.0, r * 0.0, r * 0.0, r * 0.0, r * 0.0
    skip_sum = tl.zeros([BD], tl.float32)
    end = tl.load(lengths + row).to(tl.int32) if LENGTHS else L
    offset, weight_offset = row * s_row + f * s_filter + d, row * w_row + f * w_filter + d
    target = (row * L * filters + f) * channels + d
    documents = seq_idx + row * L if DOCUMENTS else seq_idx
    T: tl.constexpr = 1 << BITS
    GROUP: tl.constexpr = 4
    first = end - 1 if PASS == 2 else 0
    sign: tl.constexpr = -1 if PASS == 2 else 1
    BACKWARDS: tl.constexpr = PASS == 2
    WEIGHED: tl.constexpr = PASS > 0
    x0, w0, k0 = fetch(signal, weight, documents, offset, weight_offset, first, 0, end, s_step, w_step, d, channels,
                       BACKWARDS, WEIGHED, DOCUMENTS)  # fmt: skip
    x1, w1, k1 = fetch(signal, weight, documents, offset, weight_offset, first + sign, 1, end, s_step, w_step,
                       d, channels, BACKWARDS, WEIGHED, DOCUMENTS)  # fmt: skip
    x2, w2, k2 = fetch(signal, weight, documents, offset, weight_offset, first + 2 * sign, 2, end, s_step, w_step,
                       d, channels, BACKWARDS, WEIGHED, DOCUMENTS)  # fmt: skip
    x3, w3, k3 = fetch(signal, weight, documents, offset, weight_offset, first + 3 * sign, 3, end, s_step, w_step,
                       d, channels, BACKWARDS, WEIGHED, DOCUMENTS)  # fmt: skip
    for begin in range(0, end, T):
        start_r, start_i, start_pr, start_pi, intact = r, i, pr, pi, 1.0
        for group in range(0, T // GROUP):
            for member in tl.static_range(GROUP):
                q = begin + group * GROUP + member
                t = first + sign * q
                x, w, keep = x0, w0, k0
                x0, w0, k0, x1, w1, k1, x2, w2, k2 = x1, w1, k1, x2, w2, k2, x3, w3, k3
                x3, w3, k3 = fetch(signal, weight, documents, offset, weight_offset, t + GROUP * sign, q + GROUP, end,
                                   s_step, w_step, d, channels, BACKWARDS, WEIGHED, DOCUMENTS)  # fmt: skip
                alive = q < end
                intact *= tl.where(alive, keep, 0.0)
                if DOCUMENTS:
                    r, i = r * keep, i * keep
                    if PASS == 1:
                        pr, pi = pr * keep, pi * keep
                before_r, before_i = r, i
                if PASS == 1:
                    next_r, next_i = times(ar, ai, pr, pi, COMPLEX)
                    pr = tl.where(alive, next_r + r, pr)
                    pi = tl.where(alive, next_i + i, pi)
                if PASS != 2:
                    r, i = times(ar, ai, r, i, COMPLEX)
                r += br * x[None, :]
                if COMPLEX:
                    i += bi * x[None, :]
                if PASS != 1:
                    y = tl.sum(cr * r + ci * i, 0) if COMPLEX else tl.sum(cr * r, 0)
                    tl.store(out + target + t.to(tl.int64) * filters * channels, y + through * x,
                             mask=d < tl.where(alive, channels, 0))  # fmt: skip
                if PASS > 0:
                    sr += r * w[None, :]
                    si += i * w[None, :]
                if PASS == 1:
                    qr += pr * w[None, :]
                    qi += pi * w[None, :]
                if PASS == 2:
                    skip_sum += x * w
                    r, i = times(ar, ai, r, i, COMPLEX)
                r, i = tl.where(alive, r, before_r), tl.where(alive, i, before_i)
        moved_r, moved_i = times(dr, di, start_r, start_i, COMPLEX)
        r += intact * moved_r
        if COMPLEX:
            i += intact * moved_i
        if PASS == 1:
            moved_r, moved_i = times(dr, di, start_pr, start_pi, COMPLEX)
            more_r, more_i = times(er, ei, start_r, start_i, COMPLEX)
            pr += intact * (moved_r + more_r)
            if COMPLEX:
                pi += intact * (moved_i + more_i)
    if PASS == 1:
        zr = tl.load(final_grad + state, mask=in_tile, other=0.0)
        of_decay = cr * qr + zr * pr
        if COMPLEX:
            zi = tl.load(final_grad + state + 1, mask=in_tile, other=0.0)
            of_decay += ci * qi + zi * pi
            tl.store(more_sums + state + 1, ci * qr - cr * qi + zi * pr - zr * pi, mask=in_tile)
        tl.store(more_sums + state, of_decay, mask=in_tile)
    else:
        tl.store(final + state, r, mask=in_tile)
        if COMPLEX:
            tl.store(final + state + 1, i, mask=in_tile)
    if PASS > 0:
        tl.store(sums + state, sr, mask=in_tile)
        if COMPLEX:
            tl.store(sums + state + 1, si, mask=in_tile)
    if PASS == 2:
        tl.store(dskip + (row * filters + f) * channels + d, skip_sum, mask=is_channel)


@triton.jit
def fetch_ahead(
    x, h, seq_idx, before_row, t, q, L, d, channels,
    BACKWARDS: tl.constexpr, COMPLEX: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Token number q of the walk: x, 1.0 where it goes on with the document of the last, and backwards the state of
    the token before it in time, 0 where a document begins."""
    WIDTH: tl.constexpr = 2 if COMPLEX else 1
    alive = q < L
    at = ((before_row + t) * channels + d) * WIDTH
    inside = d < tl.where(alive, channels, 0)
    xr = tl.load(x + at, mask=inside, other=0.0)
    xi = tl.load(x + at + 1, mask=inside, other=0.0) if COMPLEX else xr * 0.0
    keep, hr, hi = 1.0, xr, xi
    if DOCUMENTS:
        last = t + 1 if BACKWARDS else t - 1
        has_last = tl.where(alive, q, 0) > 0
        here = tl.load(seq_idx + t, mask=has_last, other=0)
        keep = tl.where(here == tl.load(seq_idx + last, mask=has_last, other=0), 1.0, 0.0)
    if BACKWARDS:
        has_before = tl.where(alive, t, 0) > 0
        inside = d < tl.where(has_before, channels, 0)
        before = at - channels * WIDTH
        hr = tl.load(h + before, mask=inside, other=0.0)
        hi = tl.load(h + before + 1, mask=inside, other=0.0) if COMPLEX else hr * 0.0
        if DOCUMENTS:
            here = tl.load(seq_idx + t, mask=has_before, other=0)
            goes_on = tl.where(here == tl.load(seq_idx + t - 1, mask=has_before, other=0), 1.0, 0.0)
            hr, hi = hr * goes_on, hi * goes_on
    return xr, xi, keep, hr, hi


@kernel
def diagonal_kernel(
    x, h, decay, start, seq_idx, out, final, ddecay, L, channels,
    BACKWARDS: tl.constexpr, COMPLEX: tl.constexpr, DOCUMENTS: tl.constexpr, START: tl.constexpr, BITS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """out_t = a out_{t-1} + x_t for BD numbers of a row.

    Backwards in time it takes the conjugate of a, writes the gradient of the start to `final` and sums what the states
    `h` of the tokens before give to the gradient of a.
    """
    tiles = tl.cdiv(channels, BD)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    d = (tl.program_id(0) % tiles) * BD + tl.arange(0, BD)
    mask = d < channels
    WIDTH: tl.constexpr = 2 if COMPLEX else 1
    ar = tl.load(decay + d * WIDTH, mask=mask, other=0.0)
    place = (row * channels + d) * WIDTH
    r, r0 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if START:
        r0 = tl.load(start + place, mask=mask, other=0.0)
    ai, i, i0 = ar * 0.0, r * 0.0, r * 0.0
    if COMPLEX:
        ai = tl.load(decay + d * WIDTH + 1, mask=mask, other=0.0)
        if START:
            i0 = tl.load(start + place + 1, mask=mask, other=0.0)
    if BACKWARDS:
        ai = -ai
    else:
        r, i = r0, i0
    dr, di, _, _ = drifts(ar, ai, BITS, COMPLEX)
    ar, ai = ar.to(tl.float32), ai.to(tl.float32)
    sum_r, sum_i = r * 0.0, r * 0.0
    T: tl.constexpr = 1 << BITS
    GROUP: tl.constexpr = 8
    documents = seq_idx + row * L if DOCUMENTS else seq_idx
    first = L - 1 if BACKWARDS else 0
    sign: tl.constexpr = -1 if BACKWARDS else 1
    before = row * L
    t0 = fetch_ahead(x, h, documents, before, first, 0, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t1 = fetch_ahead(x, h, documents, before, first + 1 * sign, 1, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t2 = fetch_ahead(x, h, documents, before, first + 2 * sign, 2, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t3 = fetch_ahead(x, h, documents, before, first + 3 * sign, 3, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t4 = fetch_ahead(x, h, documents, before, first + 4 * sign, 4, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t5 = fetch_ahead(x, h, documents, before, first + 5 * sign, 5, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t6 = fetch_ahead(x, h, documents, before, first + 6 * sign, 6, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    t7 = fetch_ahead(x, h, documents, before, first + 7 * sign, 7, L, d, channels,
                     BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
    for begin in range(0, L, T):
        start_r, start_i, intact = r, i, 1.0
        for group in range(0, T // GROUP):
            for member in tl.static_range(GROUP):
                q = begin + group * GROUP + member
                t = first + sign * q
                xr, xi, keep, hr, hi = t0
                t0, t1, t2, t3, t4, t5, t6 = t1, t2, t3, t4, t5, t6, t7
                t7 = fetch_ahead(x, h, documents, before, t + GROUP * sign, q + GROUP, L, d, channels,
                                 BACKWARDS, COMPLEX, DOCUMENTS)  # fmt: skip
                alive = q < L
                intact *= tl.where(alive, keep, 0.0)
                moved_r, moved_i = times(ar, ai, r * keep, i * keep, COMPLEX)
                r = tl.where(alive, moved_r + xr, r)
                i = tl.where(alive, moved_i + xi, i)
                if member == GROUP - 1:  # of the block's last token
                    share = tl.where(group == T // GROUP - 1, intact, 0.0)
                    moved_r, moved_i = times(dr, di, start_r, start_i, COMPLEX)
                    r += share * moved_r
                    if COMPLEX:
                        i += share * moved_i
                at = ((before + t) * channels + d) * WIDTH
                inside = d < tl.where(alive, channels, 0)
                tl.store(out + at, r, mask=inside)
                if COMPLEX:
                    tl.store(out + at + 1, i, mask=inside)
                if BACKWARDS:
                    hr = tl.where(t > 0, hr, r0)
                    sum_r += tl.where(alive, r * hr, 0.0)
                    if COMPLEX:
                        hi = tl.where(t > 0, hi, i0)
                        sum_r += tl.where(alive, i * hi, 0.0)
                        sum_i += tl.where(alive, i * hr - r * hi, 0.0)
    if BACKWARDS:
        r, i = times(ar, ai, r, i, COMPLEX)
        tl.store(final + place, r, mask=mask)
        tl.store(ddecay + place, sum_r, mask=mask)
        if COMPLEX:
            tl.store(final + place + 1, i, mask=mask)
            tl.store(ddecay + place + 1, sum_i, mask=mask)


def channel_tile(states: int) -> dict[str, int]:
    """One warp, so that sums over the states need no barrier; 256 numbers are eight to a lane, or fewer."""
    size = triton.next_power_of_2(states)
    return {"BN": size, "BD": max(4, 256 // size), "num_warps": 1, **BLOCK}


def _launch(run_pass: int, signal, weight, system, skip, seq_idx, lengths, start, final_grad, outputs, is_complex):
    """One pass: `signal` and `weight` are (B, L, D) or (B, L, F, D), `system` is the decay and what enters and leaves.

    `outputs`: out (B, L, F, D), final and the two sums over time (B, F, D, N), dskip (B, F, D); None where the pass
    has none.
    """
    decay, entering, reading = system
    filters, channels, size = entering.shape
    states = size // 2 if is_complex else size
    batch, length = signal.shape[:2]
    tile = channel_tile(states)
    grid = (triton.cdiv(channels, tile["BD"]) * filters * batch,)
    if not batch * channels * filters:
        return
    with device_guard(signal):
        channel_kernel[grid](
            signal, weight, decay, entering, reading, skip, seq_idx, lengths, start, final_grad, *outputs,
            *_strides(signal), *_strides(weight), length, channels, filters, states,
            PASS=run_pass, COMPLEX=is_complex, DOCUMENTS=seq_idx is not None, LENGTHS=lengths is not None,
            START=start is not None, SKIP=skip is not None, **tile,
        )  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """Of row, token and filter."""
    if tensor is None:
        return 0, 0, 0
    return tensor.stride(0), tensor.stride(1), tensor.stride(2) if tensor.dim() == 4 else 0


def _channel_forward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, is_complex):
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    make = u.new_empty if lengths is None else u.new_zeros  # nothing is written after a row's end
    y, final = make(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)
    rows, system = (skip, seq_idx, lengths, initial_state, None), (decay, vector, output)
    _launch(FORWARD, u, None, system, *rows, (y, final, None, None, None), is_complex)
    return y, final


def _channel_backward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal, is_complex, trains):
    (batch, _, channels), filters = u.shape, output.shape[0]
    make = dy.new_empty if lengths is None else dy.new_zeros
    du, dinitial, dskip = make(dy.shape), torch.empty_like(dfinal), u.new_empty(batch, filters, channels)
    dvector, doutput, ddecay = (torch.empty_like(dfinal) for _ in range(3))
    rows = (seq_idx, lengths)
    if trains:
        of_system = (None, None, doutput, ddecay, None)
        _launch(DERIVATIVE, u, dy, (decay, vector, output), None, *rows, initial_state, dfinal, of_system, is_complex)
    of_inputs = (du, dinitial, dvector, None, dskip)
    _launch(BACKWARD, dy, u, (decay, output, vector), skip, *rows, dfinal, None, of_inputs, is_complex)
    ddecay, dvector, doutput = (part.sum(0) for part in (ddecay, dvector, doutput))
    return [du.sum(2), ddecay.view(decay.shape).to(decay.dtype), dvector, doutput, dskip.sum(0), dinitial]


_channel = channel_op("hf_hybrid_ssm::lti_scan_triton", _channel_forward, _channel_backward)
lti_scan_triton = lti_scan_by(_channel)


def _run_diagonal(x, h, decay, initial_state, seq_idx, out, final, ddecay):
    batch, length, channels = x.shape[:3]
    with device_guard(x):
        diagonal_kernel[(triton.cdiv(channels, DIAGONAL_TILE["BD"]) * batch,)](
            x, h, decay, initial_state, seq_idx, out, final, ddecay, length, channels, BACKWARDS=h is not None,
            COMPLEX=decay.dim() == 2, DOCUMENTS=seq_idx is not None, START=initial_state is not None, **DIAGONAL_TILE,
        )  # fmt: skip


def _diagonal_forward(x, decay, initial_state, seq_idx):
    h = torch.empty_like(x)
    _run_diagonal(x, None, decay, initial_state, seq_idx, h, None, None)
    return h


def _diagonal_backward(dh, h, decay, initial_state, seq_idx):
    dx, dinitial, parts = torch.empty_like(h), *(h.new_empty(h.shape[0], *h.shape[2:]) for _ in range(2))
    _run_diagonal(dh, h, decay, initial_state, seq_idx, dx, dinitial, parts)
    return dx, parts.sum(0).to(decay.dtype), dinitial


_diagonal = diagonal_op("hf_hybrid_ssm::diagonal_scan_triton", _diagonal_forward, _diagonal_backward)
diagonal_scan_triton = diagonal_scan_by(_diagonal)
