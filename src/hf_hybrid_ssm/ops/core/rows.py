"""How an op or a layer reads its rows: what is padding, which documents a row packs, and what is wanted of it.

A `Rows` is made once a forward and checked there; every op and every layer is given the same one. It says nothing
about the numbers in a row, so that the same `Rows` serves tokens, projections and heads.

    y, state = causal_conv(x, weight, rows=Rows.of(lengths=lengths, return_final_state=True))
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_mask_values, check_seq_idx, check_tensor

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Padding:
    """The real tokens of each row. `of` and `from_mask` make one and check it; the constructor does not.

    Args:
        lengths: (B,) int, real tokens of each row.
        longest: the largest of them, where the host could read it.
        token_mask: (B, L) bool, which of the columns as given are real; None where they come first anyway.
        order: (B, L) int64, `order[b, i]` is the column as given of the i-th token of row b: real tokens come first
            and keep their order, padding follows. None where they come first anyway, like the next.
        inverse: (B, L) int64, the inverse permutation.
    """

    lengths: torch.Tensor
    longest: int | None = None
    token_mask: torch.Tensor | None = None
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None

    @classmethod
    def of(cls, lengths: torch.Tensor) -> "Padding":
        """Of rows whose real tokens come first.

        Raises:
            TypeError: `lengths` is not an integer tensor.
            ValueError: it is not of shape (B,), or a value is negative.
        """
        check_tensor("lengths", lengths, (None,), "B")
        if lengths.dtype not in INTEGERS:
            raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}.")
        if not can_read_values(lengths):
            return cls(lengths)
        values = lengths.tolist()
        if min(values, default=0) < 0:
            raise ValueError(f"lengths must lie in 0..L, the length of the row, got {values}.")
        return cls(lengths, max(values, default=0))

    @classmethod
    def from_mask(cls, mask: torch.Tensor, name: str = "attention_mask") -> "Padding | None":
        """Of a mask (B, L), 1 for text and 0 for padding, on any side; None if there is no padding.

        Only a mask that the host can read may turn out to hide nothing: on an accelerator every mask moves tokens,
        since a look at it would stop the queue once a forward.

        Raises:
            ValueError: another value; `name` names the mask.
        """
        token_mask = mask != 0
        if can_read_values(mask):
            check_mask_values(mask, token_mask, name)
            if bool(token_mask.all()):
                return None
        return cls.from_token_mask(token_mask)

    @classmethod
    def from_token_mask(cls, token_mask: torch.Tensor) -> "Padding":
        """Of (B, L) bool, which tokens are real."""
        order = torch.argsort((~token_mask).to(torch.uint8), dim=1, stable=True)
        return cls(token_mask.sum(1), None, token_mask, order, torch.argsort(order, dim=1))

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) in columns as given → real tokens first."""
        return x if self.order is None else _take(x, self.order)

    def repad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) with real tokens first → columns as given."""
        return x if self.inverse is None else _take(x, self.inverse)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents that rows pack. `of` and `from_inputs` make one and check it; the constructor does not.

    Args:
        seq_idx: (B, L) int, the document of each token, never decreasing along a row whose real tokens come first;
            padding belongs to the last one.
        by_column: the same in columns as given, where padding stands elsewhere; None where that is no difference.
        count: the most documents that a row holds, where that is known.
        is_numbered: the numbers are the caller's, and go on from piece to piece.
    """

    seq_idx: torch.Tensor
    by_column: torch.Tensor | None = None
    count: int | None = None
    is_numbered: bool = False

    @classmethod
    def of(cls, seq_idx: torch.Tensor) -> "Documents":
        """
        Raises:
            TypeError: `seq_idx` is not an integer tensor.
            ValueError: it is not of shape (B, L), or decreases along a row.
        """
        check_seq_idx(seq_idx, None, None)
        return cls(seq_idx, is_numbered=True)

    @classmethod
    def from_inputs(
        cls,
        batch: int,
        length: int,
        *,
        seq_idx: torch.Tensor | None,
        cu_seq_lens_q: torch.Tensor | None,
        restarts: torch.Tensor | None,
        padding: Padding | None,
    ) -> "Documents | None":
        """Of what a model's caller gave, the first that is not None; None where each row is one document.

        Args:
            batch, length: B, L.
            seq_idx: (B, L) int, in columns as given.
            cu_seq_lens_q: (N + 1,) int, where the documents of one row begin and end, as FlashAttention takes it.
            restarts: (B, L) int, documents as positions tell them that begin again.
            padding: of the rows.

        Raises:
            TypeError, ValueError: an argument of another type, dtype or shape, or documents that are not in order.
        """
        count, is_numbered = None, seq_idx is not None
        if seq_idx is not None:
            check_seq_idx(seq_idx, batch, length)
            if padding is not None and padding.token_mask is not None and not seq_idx.is_meta:
                seq_idx = _over_padding(seq_idx, padding.token_mask)
        elif cu_seq_lens_q is not None:
            seq_idx, count = _between(cu_seq_lens_q, batch, length), len(cu_seq_lens_q) - 1
        else:
            seq_idx = restarts
        if seq_idx is None or seq_idx.is_meta:  # documents change no shape, and no values are there to find them by
            return None
        return cls.without_padding(seq_idx, padding, count=count, is_numbered=is_numbered)

    @classmethod
    def without_padding(cls, by_column: torch.Tensor, padding: Padding | None, **known: Any) -> "Documents":
        """Of numbers (B, L) in columns as given."""
        if padding is None:
            return cls(by_column, **known)
        # padding now follows the last document: let it belong there
        return cls(padding.unpad(by_column).cummax(1).values, by_column, **known)

    @property
    def of_columns(self) -> torch.Tensor:
        """(B, L), `seq_idx` in columns as given."""
        return self.seq_idx if self.by_column is None else self.by_column

    def counted(self) -> "Documents":
        """The same with their `count`."""
        count = self.max_documents()
        torch._check(count > 0)  # all that a graph knows of the number
        return replace(self, count=count)

    def max_documents(self) -> int:
        """The most documents that a row holds.

        Where only the values of `seq_idx` tell, this waits for the device: `cu_seq_lens_q` tells by its shape.
        """
        if self.count is not None:
            return self.count
        return int((self.seq_idx[:, 1:] != self.seq_idx[:, :-1]).sum(1).max()) + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """How rows (B, L, ...) are read, whose real tokens come first; by default all are real, a row is one document, and
    no state is wanted.

    Args:
        padding: what is not real: its outputs are meaningless but finite, and it does not change a state.
        documents: those of packed rows: nothing passes from one to another, and a state that is given belongs to the
            row's first one.
        return_final_state: also return the state after each row's last real token.
        capacity: the keys that a state of all tokens has room for, in a static cache, where those of a window too lie
            in the order of `local_attention.in_order`; None: as many as there are, newest last.
        is_step: every row is one real token after a state that is given, and no gradient is wanted: an op with a
            kernel for one token takes it.
        overwrites_states: of a step, whether it may compute the next state in place of the one that is given.
    """

    padding: Padding | None = None
    documents: Documents | None = None
    return_final_state: bool = False
    capacity: int | None = None
    is_step: bool = False
    overwrites_states: bool = False

    @classmethod
    def of(
        cls,
        *,
        lengths: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        return_final_state: bool = False,
        capacity: int | None = None,
    ) -> "Rows":
        """Rows of tensors, which are checked here.

        Args:
            lengths: (B,) int, real tokens at the front of each row; None: all are real.
            seq_idx: (B, L) int, never decreasing, the document of each token; None: a row is one document.
            return_final_state, capacity: as of `Rows`.

        Raises:
            TypeError, ValueError: as of `Padding.of` and `Documents.of`.
        """
        return cls(
            padding=None if lengths is None else Padding.of(lengths),
            documents=None if seq_idx is None else Documents.of(seq_idx),
            return_final_state=return_final_state,
            capacity=capacity,
        )

    @property
    def lengths(self) -> torch.Tensor | None:
        """(B,) real tokens of each row; None where all are real."""
        return None if self.padding is None else self.padding.lengths

    @property
    def seq_idx(self) -> torch.Tensor | None:
        """(B, L) the document of each token; None where a row is one document."""
        return None if self.documents is None else self.documents.seq_idx

    def to(self, device: torch.device, non_blocking: bool = False) -> "Rows":
        """accelerate asks this of what a layer on another device is called with."""
        return moved(self, device, non_blocking)


PLAIN_ROWS = Rows()
"""Rows without padding, of one document each, whose state is not wanted."""


def is_one_token(rows: Rows, length: int, state: object) -> bool:
    """Whether an op is to take its kernel for one token.

    Args:
        length: L of its input.
        state: the one before it, or None.

    Raises:
        TypeError: `rows` is not a `Rows`.
        ValueError: it is a step, and the input is not.
    """
    if not isinstance(rows, Rows):
        raise TypeError(f"rows must be a Rows, as Rows.of makes it, got {type(rows).__name__}.")
    if not rows.is_step or state is None:
        return False
    if length != 1:
        raise ValueError(f"rows.is_step=True needs rows of one token, got {length}.")
    return True


def checked_rows(rows: Rows, batch: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`seq_idx` (B, L) and `lengths` (B,) of the rows of an op's input, each None where there is none.

    Raises:
        TypeError: `rows` is not a `Rows`.
        ValueError: it is of other rows than these.
    """
    if not isinstance(rows, Rows):
        raise TypeError(f"rows must be a Rows, as Rows.of makes it, got {type(rows).__name__}.")
    documents, padding = rows.documents, rows.padding
    if documents is not None and documents.seq_idx.shape != (batch, length):
        shape = tuple(documents.seq_idx.shape)
        raise ValueError(f"seq_idx must have shape (B, L) = ({batch}, {length}), got {shape}.")
    if padding is not None:
        if padding.lengths.shape != (batch,):
            raise ValueError(f"lengths must have shape (B) = ({batch}), got {tuple(padding.lengths.shape)}.")
        longest = None if torch.compiler.is_compiling() else padding.longest
        if longest is not None and longest > length:
            values = padding.lengths.tolist()
            raise ValueError(f"lengths must lie in 0..{length}, the length of the row, got {values}.")
    return None if documents is None else documents.seq_idx, None if padding is None else padding.lengths


def moved(value: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A dataclass, or a dictionary of tensors, with all its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, dict):
        return {name: moved(part, device, non_blocking) for name, part in value.items()}
    if not isinstance(value, Rows | Padding | Documents):
        return value
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: moved(part, device, non_blocking) for name, part in parts.items()})


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def _between(cu_seq_lens_q: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(1, L) the document of each token, from where documents begin and end."""
    if not isinstance(cu_seq_lens_q, torch.Tensor) or cu_seq_lens_q.dtype not in INTEGERS:
        have = getattr(cu_seq_lens_q, "dtype", type(cu_seq_lens_q).__name__)
        raise TypeError(f"cu_seq_lens_q must be an int32 or int64 tensor, got {have}.")
    if cu_seq_lens_q.dim() != 1 or len(cu_seq_lens_q) < 2:
        raise ValueError(f"cu_seq_lens_q must have shape (documents + 1,), got {tuple(cu_seq_lens_q.shape)}.")
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of one row, got {batch}: give seq_idx.")
    if can_read_values(cu_seq_lens_q):
        ends = cu_seq_lens_q.tolist()
        if ends[0] != 0 or ends[-1] != length or ends != sorted(ends):
            raise ValueError(f"cu_seq_lens_q must rise from 0 to the length {length}, got {ends}.")
    columns = torch.arange(length, device=cu_seq_lens_q.device)
    return torch.bucketize(columns, cu_seq_lens_q[1:].long(), right=True).unsqueeze(0)


def _over_padding(seq_idx: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Padding belongs to the document before it, at the front of a row to the first one."""
    first = seq_idx.gather(1, token_mask.to(torch.uint8).argmax(1, keepdim=True))
    return torch.where(token_mask, seq_idx, first).cummax(1).values
