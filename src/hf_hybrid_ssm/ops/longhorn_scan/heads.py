"""Heads of the Longhorn scan: groups of channels with keys and queries of their own, folded into the batch.

The kernels know rows whose channels share keys and queries; a head of a row is such a row. What differs from channel
to channel but not from row to row (the bias of β's logit and the skip weight) and the gate are applied around the
kernel. It gets float32 or wider, so that 16-bit inputs are rounded once, at the end, as they are without heads.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.pages import gathers_pages
from hf_hybrid_ssm.ops.longhorn_scan.reference import ScanInputs


def over_heads(scan: Callable) -> Callable:
    """An implementation of the scan, or of its step, that also takes k and q (B, L, H, N), for H groups of D / H
    channels. Pages of a step are gathered for it, and put back."""

    @functools.wraps(scan)
    def with_heads(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
        if inputs.k.dim() == 3:
            return scan(inputs)
        if inputs.pages is not None:
            return gathers_pages(with_heads)(inputs)
        x, beta_logit, k, q, z, beta_bias, D, state, seq_idx, lengths, *_ = inputs
        batch, heads, dtype = x.shape[0], k.shape[2], torch.promote_types(x.dtype, torch.float32)
        values = zero_beyond(x, lengths).to(dtype)
        by_head = (values, _biased(beta_logit.to(dtype), beta_bias))
        values_of, logits_of = (
            tokens.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2).flatten(0, 1) for tokens in by_head
        )
        keys, queries = (tokens.to(dtype).transpose(1, 2).flatten(0, 1) for tokens in (k, q))
        of_heads = ScanInputs(
            values_of,
            logits_of,
            keys,
            queries,
            state=None if state is None else state.unflatten(1, (heads, x.shape[2] // heads)).flatten(0, 1),
            seq_idx=None if seq_idx is None else seq_idx.repeat_interleave(heads, dim=0),
            lengths=None if lengths is None else lengths.repeat_interleave(heads, dim=0),
        )
        y, final_state = scan(of_heads)
        y = y.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2)
        y = _skipped_and_gated(y, values, D, None if z is None else zero_beyond(z, lengths).to(dtype))
        return y.to(x.dtype), final_state.unflatten(0, (batch, heads)).flatten(1, 2)

    return with_heads


def _biased(beta_logit: torch.Tensor, beta_bias: torch.Tensor | None) -> torch.Tensor:
    return beta_logit if beta_bias is None else beta_logit + beta_bias.to(beta_logit.dtype)


def _skipped_and_gated(
    y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    """(y + D x) silu(z)."""
    y = y if D is None else torch.addcmul(y, D.to(y.dtype), x)
    return y if z is None else y * F.silu(z)
