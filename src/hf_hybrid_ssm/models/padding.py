"""Padding: a row's real tokens are moved to its front, so that every layer sees the row as if it stood alone.

One code path then serves left, right and scattered padding, in the first forward and in every later one: windows,
blocks and decays count real tokens only, and a state passes padding unchanged.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CompactRows:
    """How the tokens of a padded batch move.

    Args:
        order: (B, L) int64, `order[b, i]` is the column of the i-th token of the compacted row b; real tokens come
            first and keep their order, padding follows.
        inverse: (B, L) int64, the way back.
        lengths: (B,) int64, number of real tokens of each row.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    lengths: torch.Tensor

    def compact(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) in columns as given → real tokens first."""
        return _take(x, self.order)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) with real tokens first → columns as given."""
        return _take(x, self.inverse)

    def lengths_of_first(self, num_columns: int) -> torch.Tensor:
        """(B,) real tokens of each row among its first `num_columns` columns as given."""
        return (self.inverse[:, :num_columns] < self.lengths[:, None]).sum(1)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def compact_rows(attention_mask: torch.Tensor | None, batch: int, length: int) -> CompactRows | None:
    """The moves for this forward, or None if there is nothing to move.

    Args:
        attention_mask: (B, T) with T ≥ length, nonzero for real tokens; its last `length` columns are this forward's,
            the ones before belong to tokens already in the cache.

    Raises:
        ValueError: the mask does not fit the input.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask must have shape (batch, tokens so far) = ({batch}, at least {length}), got "
            f"{tuple(attention_mask.shape)}."
        )
    real = attention_mask[:, attention_mask.shape[1] - length :] != 0
    if not torch.compiler.is_compiling() and bool(real.all()):
        return None
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    return CompactRows(order, torch.argsort(order, dim=1), real.sum(1))
