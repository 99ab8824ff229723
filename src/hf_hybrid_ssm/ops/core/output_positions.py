"""Outputs at some tokens only, for mixers whose outputs elsewhere nobody reads."""

from dataclasses import dataclass

import torch

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_tensor


@dataclass(frozen=True, eq=False)
class OutputPositions:
    """The tokens whose outputs are wanted. `of` makes one and checks it; the constructor does not.

    Args:
        stride: every `stride`-th token.
        positions: (B, J) int64, these tokens of each row. Neither: all.
    """

    stride: int | None = None
    positions: torch.Tensor | None = None

    @classmethod
    def of(cls, stride: int | None, positions: torch.Tensor | None, batch: int, length: int) -> "OutputPositions":
        """Of rows (B, L).

        Raises:
            TypeError: `positions` is not an int64 tensor.
            ValueError: both are given, `stride` < 1, or `positions` has the wrong shape or values outside of 0..L-1.
        """
        if stride is not None and stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}.")
        if positions is None:
            return cls(stride)
        if stride is not None:
            raise ValueError(f"stride={stride} and positions are two ways to say which outputs are wanted: give one.")
        check_tensor("positions", positions, (batch, None), "B, J")
        if positions.dtype != torch.int64:
            raise TypeError(f"positions must be int64, got {positions.dtype}.")
        if can_read_values(positions) and bool(((positions < 0) | (positions >= length)).any()):
            last, low, high = length - 1, int(positions.min()), int(positions.max())
            raise ValueError(f"positions must lie in 0..{last}, got {low}..{high}.")
        return cls(None, positions)

    @property
    def is_all(self) -> bool:
        """Outputs at every token."""
        return self.stride is None and self.positions is None

    def count(self, length: int) -> int:
        """How many outputs a row of L tokens has."""
        if self.positions is not None:
            return self.positions.shape[1]
        return length if self.stride is None else length // self.stride

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The wanted tokens of x (B, L, ...)."""
        if self.positions is not None:
            index = self.positions.view(*self.positions.shape, *(1,) * (x.dim() - 2))
            return x.gather(1, index.expand(-1, -1, *x.shape[2:]))
        return x if self.stride is None else x[:, self.stride - 1 :: self.stride]


ALL_OUTPUTS = OutputPositions()
