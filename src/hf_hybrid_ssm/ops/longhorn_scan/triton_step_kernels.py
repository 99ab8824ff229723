"""The Triton kernel of one decoded token: scan, skip and gate in one launch."""

import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import kernel, load, program_coords
from hf_hybrid_ssm.ops.longhorn_scan.triton_kernels import compute_delta


@kernel
def step_kernel(
    x, beta_logit, k, q, z, beta_bias, skip, state, pages, y,
    x_row, logit_row, k_row, q_row, z_row, state_row, channels, num_states, tiles,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_PAGES: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """h += Delta k (x - k h) in place, y = (q·h + D x) silu(z), for BD channels of one row or its page."""
    tile, _, row = program_coords(tl.program_id(0), tiles, 1)
    d, n = tile * BD + tl.arange(0, BD), tl.arange(0, BN)
    is_channel, is_state = d < channels, n < num_states
    page = tl.load(pages + row) if HAS_PAGES else row
    held = state + page * state_row + (d[:, None] * num_states + n[None, :])
    in_tile = is_channel[:, None] & is_state[None, :]
    h = load(held, in_tile)
    k_t, q_t = load(k + row * k_row + n, is_state), load(q + row * q_row + n, is_state)
    x_t, logit = load(x + row * x_row + d, is_channel), load(beta_logit + row * logit_row + d, is_channel)
    if HAS_BIAS:
        logit += load(beta_bias + d, is_channel)
    delta, _ = compute_delta(logit, tl.sum(k_t * k_t))
    h += delta[:, None] * k_t[None, :] * (x_t[:, None] - k_t[None, :] * h)
    tl.store(held, h, mask=in_tile)
    y_t = tl.sum(h * q_t[None, :], 1)
    if HAS_SKIP:
        y_t += load(skip + d, is_channel) * x_t
    if HAS_GATE:
        z_t = load(z + row * z_row + d, is_channel)
        y_t = y_t * z_t * tl.sigmoid(z_t)
    tl.store(y + row * channels + d, y_t, mask=is_channel)
