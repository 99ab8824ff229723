"""Packed rows taken apart, where a recurrence cannot reset midway: every document becomes a row of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.transforms import is_batched


@dataclass(frozen=True)
class PackedSequences:
    """The documents of a packed batch, N in all.

    Args:
        gather_index: (N, T) int64, `gather_index[n, t]` is the flat index b · L + l of a document's token (after its
            end any valid one).
        lengths: (N,) int64, tokens of each document.
        first: (B,) int64, each row's first document.
        last: (B,) int64, the document that holds the row's last real token.
        scatter_index: (B, L) int64, the flat index n · T + t of each token of the batch.
    """

    gather_index: torch.Tensor
    lengths: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    scatter_index: torch.Tensor

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) → (N, T, ...), zero after the end of each document."""
        tokens = x.flatten(0, 1).index_select(0, self.gather_index.flatten())
        return zero_beyond(tokens.unflatten(0, self.gather_index.shape), self.lengths)

    def pack(self, y: torch.Tensor) -> torch.Tensor:
        """(N, T, ...) → (B, L, ...)."""
        return y.flatten(0, 1).index_select(0, self.scatter_index.flatten()).unflatten(0, self.scatter_index.shape)

    def unpack_state(self, state: torch.Tensor | None) -> torch.Tensor | None:
        """(B, ...) → (N, ...): a row's state belongs to its first document, the others start from zero."""
        if state is None:
            return None
        return state.new_zeros(len(self.lengths), *state.shape[1:]).index_copy(0, self.first, state)


def packed_sequences(seq_idx: torch.Tensor, lengths: torch.Tensor | None) -> PackedSequences:
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
    gather_index = (begin.unsqueeze(1) + torch.arange(longest, device=seq_idx.device)).clamp(max=batch * length - 1)
    first = document.view(batch, length)[:, 0]
    end = torch.full_like(first, length) if lengths is None else lengths.to(first.dtype)
    last = document.view(batch, length).gather(1, (end - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return PackedSequences(gather_index, count, first, last, (document * longest + column).view(batch, length))


def run_by_document(
    run: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]], inputs: Any, seq_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`run(inputs)`, with x (B, L, ...), `state` and `lengths` among them, on the documents of packed rows, each from
    its own start.

    Returns:
        Outputs (B, L, ...), and for each row the state after its last real token (None if `run` returns none).
    """
    if seq_idx is None or seq_idx.numel() == 0:
        return run(inputs._replace(x=zero_beyond(inputs.x, inputs.lengths)))
    documents = packed_sequences(seq_idx, inputs.lengths)
    x, state = documents.unpack(inputs.x), documents.unpack_state(inputs.state)
    y, final = run(inputs._replace(x=x, state=state, lengths=documents.lengths))
    return documents.pack(y), None if final is None else final[documents.last]
