"""Outputs at some tokens only, for mixers whose outputs elsewhere nobody reads."""

import torch

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_tensor


def check_output_positions(stride: int | None, positions: torch.Tensor | None, batch: int, length: int) -> None:
    """The two ways to ask for some outputs only: every `stride`-th token, or those at `positions` (B, J) of each row.

    Raises:
        TypeError: `positions` is not an int64 tensor.
        ValueError: both are given, `stride` < 1, or `positions` has the wrong shape or values outside of 0..L-1.
    """
    if stride is not None and stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}.")
    if positions is None:
        return
    if stride is not None:
        raise ValueError(f"stride={stride} and positions are two ways to say which outputs are wanted: give one.")
    check_tensor("positions", positions, (batch, None), "B, J")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must be int64, got {positions.dtype}.")
    if can_read_values(positions) and bool(((positions < 0) | (positions >= length)).any()):
        raise ValueError(f"positions must lie in 0..{length - 1}, got {int(positions.min())}..{int(positions.max())}.")


def take_outputs(x: torch.Tensor, stride: int | None, positions: torch.Tensor | None) -> torch.Tensor:
    """The wanted tokens of x (B, L, D): all, every `stride`-th, or those at `positions` (B, J)."""
    if positions is not None:
        return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return x if stride is None else x[:, stride - 1 :: stride]
