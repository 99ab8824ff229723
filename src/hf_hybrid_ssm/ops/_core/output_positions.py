"""Only some outputs of a mixer: every so many tokens, or the tokens of a list."""

import torch

from hf_hybrid_ssm.ops._core.checks import can_read_values, check_tensor


def check_output_positions(every: int | None, at: torch.Tensor | None, batch: int, length: int) -> None:
    """The two ways to ask for some outputs only: every `every`-th token, or the tokens `at` (B, J) of each row.

    Raises:
        TypeError: `at` is no int64 tensor.
        ValueError: both are given, `every` < 1, or `at` has the wrong shape or positions outside of 0..L-1.
    """
    if every is not None and every < 1:
        raise ValueError(f"every must be at least 1, got {every}.")
    if at is None:
        return
    if every is not None:
        raise ValueError(f"every={every} and at are two ways to say which outputs are wanted: give one.")
    check_tensor("at", at, (batch, None), "B, J")
    if at.dtype != torch.int64:
        raise TypeError(f"at must be int64, got {at.dtype}.")
    if can_read_values(at) and bool(((at < 0) | (at >= length)).any()):
        raise ValueError(f"at must lie in 0..{length - 1}, got {int(at.min())}..{int(at.max())}.")


def take_outputs(x: torch.Tensor, every: int | None, at: torch.Tensor | None) -> torch.Tensor:
    """The wanted tokens of x (B, L, D): all, every `every`-th, or those `at` (B, J)."""
    if at is not None:
        return x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return x if every is None else x[:, every - 1 :: every]
