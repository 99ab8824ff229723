"""Rows of unequal length: real tokens at the front, anything after them."""

import torch

from hf_hybrid_ssm.ops._core.checks import can_read_values, check_tensor


def check_lengths(lengths: torch.Tensor | None, batch: int, length: int) -> None:
    """`lengths` (B,) integer in 0..L. The range is checked only where the values can be read.

    Raises:
        TypeError: not an integer tensor.
        ValueError: wrong shape or a value out of range.
    """
    if lengths is None:
        return
    check_tensor("lengths", lengths, (batch,), "B")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}.")
    if can_read_values(lengths) and bool(((lengths < 0) | (lengths > length)).any()):
        raise ValueError(f"lengths must lie in 0..{length}, the length of the row, got {lengths.tolist()}.")


def zero_beyond(x: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """x (B, L, ...) with all that lies after each row's length replaced by 0: a NaN there must not spread."""
    if lengths is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
    return torch.where(real.view(*real.shape, *[1] * (x.dim() - 2)), x, 0.0)


def extend_last_document(seq_idx: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """seq_idx (B, L) with each row's padding assigned to its last real document, so that no state resets there."""
    last = seq_idx.gather(1, (lengths.long() - 1).clamp(min=0).unsqueeze(1))
    real = torch.arange(seq_idx.shape[1], device=seq_idx.device) < lengths.unsqueeze(1)
    return torch.where(real, seq_idx, last)
