"""Heads of the Longhorn scan: groups of channels with keys and queries of their own, folded into the batch.

The kernels know rows whose channels share keys and queries; a head of a row is such a row. What differs from channel
to channel but not from row to row (the bias of β's logit and the skip weight) and the gate are applied around the
kernel. It gets float32 or wider, so that 16-bit inputs are rounded once, at the end, as they are without heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.pages import on_rows


def over_heads(scan: Callable) -> Callable:
    """An implementation of the scan that also takes k and q (B, L, H, N), for H groups of D / H channels."""

    @functools.wraps(scan)
    def with_heads(
        x: torch.Tensor,
        beta_logit: torch.Tensor,
        k: torch.Tensor,
        q: torch.Tensor,
        *,
        beta_bias: torch.Tensor | None = None,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        initial_state: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if k.dim() == 3:
            options = {"beta_bias": beta_bias, "D": D, "z": z, "initial_state": initial_state}
            return scan(x, beta_logit, k, q, **options, seq_idx=seq_idx, lengths=lengths)
        batch, heads, dtype = x.shape[0], k.shape[2], torch.promote_types(x.dtype, torch.float32)
        values = zero_beyond(x, lengths).to(dtype)
        by_head = (values, _biased(beta_logit.to(dtype), beta_bias))
        y, final_state = scan(
            *(tokens.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2).flatten(0, 1) for tokens in by_head),
            *(tokens.to(dtype).transpose(1, 2).flatten(0, 1) for tokens in (k, q)),
            initial_state=None if initial_state is None else _folded(initial_state, heads),
            seq_idx=None if seq_idx is None else seq_idx.repeat_interleave(heads, dim=0),
            lengths=None if lengths is None else lengths.repeat_interleave(heads, dim=0),
        )
        y = y.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2)
        y = _skipped_and_gated(y, values, D, None if z is None else zero_beyond(z, lengths).to(dtype))
        return y.to(x.dtype), final_state.unflatten(0, (batch, heads)).flatten(1, 2)

    return with_heads


def step_over_heads(step: Callable) -> Callable:
    """The same of one token, with k and q (B, 1, H, N). Pages are gathered for it, and put back."""

    @functools.wraps(step)
    def with_heads(
        x: torch.Tensor,
        beta_logit: torch.Tensor,
        k: torch.Tensor,
        q: torch.Tensor,
        state: torch.Tensor,
        *,
        beta_bias: torch.Tensor | None = None,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        **paged: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"beta_bias": beta_bias, "D": D, "z": z}
        if k.dim() == 3:
            return step(x, beta_logit, k, q, state, **options, **paged)
        if paged.get("pages") is not None:
            return on_rows(
                lambda rows: with_heads(x, beta_logit, k, q, rows, **options)[0], state, paged["pages"]
            ), state
        (batch, _, heads, states), dtype = k.shape, torch.promote_types(x.dtype, torch.float32)
        values = x.to(dtype)
        by_head = (values, _biased(beta_logit.to(dtype), beta_bias))
        of_channels = (part.reshape(batch * heads, 1, -1) for part in by_head)
        of_states = (part.to(dtype).reshape(batch * heads, 1, states) for part in (k, q))
        y, _ = step(*of_channels, *of_states, _folded(state, heads))
        y = _skipped_and_gated(y.view(x.shape), values, D, None if z is None else z.to(dtype))
        return y.to(x.dtype), state

    return with_heads


def _folded(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, D, ...) → (B H, D / H, ...), of contiguous rows the same memory."""
    return x.unflatten(1, (heads, x.shape[1] // heads)).flatten(0, 1)


def _biased(beta_logit: torch.Tensor, beta_bias: torch.Tensor | None) -> torch.Tensor:
    return beta_logit if beta_bias is None else beta_logit + beta_bias.to(beta_logit.dtype)


def _skipped_and_gated(
    y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    """(y + D x) silu(z)."""
    y = y if D is None else torch.addcmul(y, D.to(y.dtype), x)
    return y if z is None else y * F.silu(z)
