"""The rows of a batch: real tokens at the front of each (`lengths`), and the documents packed into it (`seq_idx`).

Where a recurrence cannot reset midway, packed rows are taken apart: every document becomes a row of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_hybrid_ssm.ops.core.transforms import is_batched


def zero_beyond(x: torch.Tensor, lengths: torch.Tensor | None, dim: int = 1) -> torch.Tensor:
    """x (B, ..., L, ...), 0 along `dim` after each row's length: a NaN there must not spread."""
    if lengths is None:
        return x
    batch, length = x.shape[0], x.shape[dim]
    real = torch.arange(length, device=x.device) < lengths.unsqueeze(1)
    return torch.where(real.view(batch, *[1] * (dim - 1), length, *[1] * (x.dim() - dim - 1)), x, 0.0)


def extend_last_document(seq_idx: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """seq_idx (B, L) with each row's padding assigned to its last real document, so that no state resets there."""
    last = seq_idx.gather(1, (lengths.long() - 1).clamp(min=0).unsqueeze(1))
    real = torch.arange(seq_idx.shape[1], device=seq_idx.device) < lengths.unsqueeze(1)
    return torch.where(real, seq_idx, last)


def take_outputs(x: torch.Tensor, stride: int | None, positions: torch.Tensor | None) -> torch.Tensor:
    """The wanted tokens of x (B, L, D): all, every `stride`-th, or those at `positions` (B, J)."""
    if positions is not None:
        return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return x if stride is None else x[:, stride - 1 :: stride]


def last_inputs(
    x: torch.Tensor,
    width: int,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The last K - 1 inputs of each row's last document, zero where that document is shorter; (B, K - 1, D).

    Args:
        x: (B, L, D).
        width: K, the taps.
        initial_state: (B, K - 1, D), the inputs before the row's first token, of its first document.
        seq_idx: (B, L) int.
        lengths: (B,) int.
    """
    batch, length, channels = x.shape
    if lengths is None and seq_idx is None and length >= width - 1:
        return x[:, length - width + 1 :].clone()
    if length == 0:
        return x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state.to(x.dtype)
    ends = torch.full((batch,), length, device=x.device) if lengths is None else lengths.long()
    columns = ends.unsqueeze(1) + torch.arange(1 - width, 0, device=x.device)  # negative ones lie in the state
    inside, index = columns >= 0, columns.clamp(min=0)
    state = x.gather(1, index.unsqueeze(-1).expand(-1, -1, channels))
    before: torch.Tensor | float = 0.0
    if initial_state is not None:
        early = (columns + width - 1).clamp(max=width - 2).unsqueeze(-1)
        before = initial_state.to(x.dtype).gather(1, early.expand(-1, -1, channels))
    state = torch.where(inside.unsqueeze(-1), state, before)
    if seq_idx is None:
        return state
    last = seq_idx.gather(1, (ends - 1).clamp(min=0).unsqueeze(1))
    return torch.where((seq_idx.gather(1, index) == last).unsqueeze(-1), state, 0.0)


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
        rows = x.flatten(0, 1).index_select(0, self.gather_index.flatten())
        return zero_beyond(rows.unflatten(0, self.gather_index.shape), self.lengths)

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
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    x: torch.Tensor,
    state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`run(x, state=..., lengths=...)` on the documents of packed rows x (B, L, ...), each from its own start.

    Returns:
        Outputs (B, L, ...), and for each row the state after its last real token (None if `run` returns none).
    """
    if seq_idx is None or seq_idx.numel() == 0:
        return run(zero_beyond(x, lengths), state=state, lengths=lengths)
    documents = packed_sequences(seq_idx, lengths)
    y, final = run(documents.unpack(x), state=documents.unpack_state(state), lengths=documents.lengths)
    return documents.pack(y), None if final is None else final[documents.last]
