"""Unpadding: a row's real tokens are moved to its front, so that every layer sees the row as if it were alone.

One code path then serves left, right and scattered padding, in the first forward and in every later one: windows,
blocks and decays count real tokens only, and a state passes padding unchanged.
"""

from dataclasses import dataclass

import torch

from hf_hybrid_ssm.ops._core.checks import can_read_values


@dataclass(frozen=True)
class Unpadding:
    """How the tokens of a padded batch move.

    Args:
        order: (B, L) int64, `order[b, i]` is the column of the i-th token of the unpadded row b; real tokens come
            first and keep their order, padding follows.
        inverse: (B, L) int64, the inverse permutation.
        lengths: (B,) int64, number of real tokens of each row.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    lengths: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        """(B, L) bool in columns as given: no padding."""
        return self.inverse < self.lengths[:, None]

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) in columns as given → real tokens first."""
        return _take(x, self.order)

    def repad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) with real tokens first → columns as given."""
        return _take(x, self.inverse)

    def lengths_of_first(self, num_columns: int) -> torch.Tensor:
        """(B,) real tokens of each row among its first `num_columns` columns as given."""
        return self.real[:, :num_columns].sum(1)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def check_mask_shape(
    attention_mask: torch.Tensor,
    batch: int,
    length: int,
    past_length: int | None = None,
    name: str = "attention_mask",
) -> None:
    """`attention_mask` (B, T) for the L tokens of this forward, T = L, or for all tokens so far.

    Args:
        past_length: tokens in the cache; None where it is not known, and T ≥ L will do.
        name: of the mask, in messages.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: another shape.
    """
    if not isinstance(attention_mask, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(attention_mask).__name__}.")
    have = tuple(attention_mask.shape)
    if len(have) != 2 or have[0] != batch or have[1] < length:
        raise ValueError(f"{name} must have shape (batch, tokens so far) = ({batch}, at least {length}), got {have}.")
    if past_length is not None and have[1] not in (length, past_length + length):
        raise ValueError(
            f"{name} must have shape (batch, tokens so far) = ({batch}, {past_length + length}), got {have}: "
            f"{past_length} tokens are in the cache, {length} are given."
        )


def unpadding_of(
    attention_mask: torch.Tensor | None, batch: int, length: int, name: str = "attention_mask"
) -> Unpadding | None:
    """The moves for this forward, or None if there is nothing to move.

    Only a mask that the host can read may turn out to hide nothing: on an accelerator every mask gives moves, since a
    look at it would stop the queue once a forward.

    Args:
        attention_mask: (B, T) with T ≥ length, nonzero for real tokens; its last `length` columns are this forward's,
            the ones before belong to tokens already in the cache.
        name: of the mask, in messages.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: the mask does not fit the input, or has other values than 0 and 1.
    """
    if attention_mask is None:
        return None
    check_mask_shape(attention_mask, batch, length, name=name)
    attention_mask = attention_mask[:, attention_mask.shape[1] - length :]
    real = attention_mask != 0
    if can_read_values(attention_mask):
        if bool((attention_mask * real != real).any()):
            low, high = (bound.item() for bound in torch.aminmax(attention_mask))
            raise ValueError(
                f"{name} must be 1 for text and 0 for padding, got values from {low} to {high}; documents of a "
                "packed row go to seq_idx, and an additive mask is not understood."
            )
        if bool(real.all()):
            return None
    order = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    return Unpadding(order, torch.argsort(order, dim=1), real.sum(1))
