"""Packed rows taken apart: every document becomes a row of its own, for recurrences that cannot reset midway."""

from dataclasses import dataclass

import torch

from hf_hybrid_ssm.ops.transforms import is_batched


@dataclass(frozen=True)
class Documents:
    """The documents of a packed batch, N in all.

    Args:
        token: (N, T) int64, `token[n, t]` is the flat index b · L + l of a document's token (any valid one behind its
            end).
        lengths: (N,) int64, tokens of each document.
        row: (N,) int64, the row it comes from.
        first: (B,) int64, each row's first document.
        last: (B,) int64, the document that holds the row's last real token.
        place: (B, L) int64, the flat index n · T + t of each token of the batch.
    """

    token: torch.Tensor
    lengths: torch.Tensor
    row: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    place: torch.Tensor

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) → (N, T, ...)."""
        return x.flatten(0, 1)[self.token]

    def join(self, y: torch.Tensor) -> torch.Tensor:
        """(N, T, ...) → (B, L, ...)."""
        return y.flatten(0, 1)[self.place]


def documents_of(seq_idx: torch.Tensor, lengths: torch.Tensor | None) -> Documents:
    """The documents of `seq_idx` (B, L); with `lengths` (B,), only each row's first tokens are real.

    Raises:
        ValueError: under vmap over `seq_idx`, where the number of documents is not one number.
    """
    if is_batched(seq_idx):
        raise ValueError("seq_idx must not be mapped over by vmap: the number of documents depends on its values.")
    batch, length = seq_idx.shape
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    document = starts.flatten().cumsum(0) - 1  # (B L,)
    flat = torch.arange(batch * length, device=seq_idx.device)
    begin = flat[starts.flatten()]
    column = flat - begin[document]
    real = torch.ones_like(starts)
    if lengths is not None:
        real = torch.arange(length, device=seq_idx.device) < lengths.unsqueeze(1)
    count = torch.zeros_like(begin).index_add_(0, document, real.flatten().to(begin.dtype))
    longest = int(column.max()) + 1
    token = (begin.unsqueeze(1) + torch.arange(longest, device=seq_idx.device)).clamp(max=batch * length - 1)
    row = begin // length
    first = document.view(batch, length)[:, 0]
    end = torch.full_like(first, length) if lengths is None else lengths.to(first.dtype)
    last = document.view(batch, length).gather(1, (end - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return Documents(token, count, row, first, last, (document * longest + column).view(batch, length))
