"""The Triton kernel of the scan of numbers that each have a decay of their own; see `triton_channel_kernels`."""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import kernel
from hf_hybrid_ssm.ops.linear_scan.triton_channel_kernels import drifts, times


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
