"""Rows as layers see them: without padding, and split into documents.

**Padding.** A row's real tokens are moved to its front, so that every layer sees the row as if it were alone. One code
path then serves left, right and scattered padding, in the first forward and in every later one: windows, blocks and
decays count real tokens only, and a state passes padding unchanged.

**Documents.** Within a piece, `seq_idx`, `cu_seq_lens_q` or positions that restart say where documents begin. Whether
the first token of a later piece continues the row's last document is decided by its `seq_idx`: the number of the last
token continues, another begins a document. Without `seq_idx`, a position of 0 begins one. What later pieces must know
is cached with the states (`RecurrentStateLayer.packing_state`):

    document    (B,) int64, 2 seq_idx + 1 of the row's last token; 0 where no seq_idx was given
    start       (B,) int64, the column of all tokens so far where the row's last document begins
    token_mask  (B, T) bool, which columns so far are not padding; where layers attend to single columns
    padding     (B,) int64, the same in one number (`past_padding.signature`); None where there was none
"""

import copy
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_map_only

from hf_hybrid_ssm.models.inputs import check_position_ids
from hf_hybrid_ssm.models.past_padding import check_columns_are_known, check_past, signature
from hf_hybrid_ssm.ops.core.checks import can_read_values, check_seq_idx

States = dict[str, torch.Tensor]


@dataclass(eq=False)
class PackedRows:
    """Padding and documents of the tokens of one forward; by default there is no padding, and a row is one document.

    Args:
        length: L, tokens of this forward.
        past: tokens before them.
        token_mask: (B, L) bool, the tokens that are not padding; None where all are real.
        seq_idx: (B, L) int, never decreasing; None where each row is one document. The first may have begun earlier.
        has_explicit_seq_idx: the caller gave `seq_idx`, whose numbers then go on from piece to piece.
        starts_new_document: (B,) bool, the row's first real token begins a document though the cache holds tokens;
            None if no row does.
        full_token_mask: (B, past + L) bool, the columns so far that are not padding; None where all are real, or where
            the layers do not need it.
        keeps_starts: the layers need `starts`, in this forward and later.
        mask_covers_cache: the attention mask was one of all tokens so far.
        num_documents: of the row, where the caller said so.
        before: `packing_state` of the piece before.

    Attributes:
        order: (B, L) int64, `order[b, i]` is the column of the i-th token of the unpadded row b: real tokens come
            first and keep their order, padding follows. None without padding, like the next two.
        inverse: (B, L) int64, the inverse permutation.
        lengths: (B,) int64, real tokens of each row.
        unpadded_seq_idx: (B, L), `seq_idx` in the order of the unpadded rows.
        starts: (B, L) int64, the column of all tokens so far where each token's document begins; None where that is 0.
        packing_state: what the next piece must know.
        is_step: one real token a row, of the document before it or of its own.
    """

    length: int
    past: int | torch.Tensor = 0
    token_mask: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    has_explicit_seq_idx: bool = False
    starts_new_document: torch.Tensor | None = None
    full_token_mask: torch.Tensor | None = None
    keeps_starts: bool = False
    mask_covers_cache: bool = False
    num_documents: int | None = None
    before: States = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_step = self.length == 1 and self.token_mask is None and self.seq_idx is None  # asked by every layer
        self.order = self.inverse = self.lengths = None
        self.unpadded_seq_idx = self.seq_idx
        if self.token_mask is not None:
            self.order = torch.argsort((~self.token_mask).to(torch.uint8), dim=1, stable=True)
            self.inverse = torch.argsort(self.order, dim=1)
            self.lengths = self.token_mask.sum(1)
            if self.seq_idx is not None:  # padding now follows the last document: let it belong there
                self.unpadded_seq_idx = self.unpad(self.seq_idx).cummax(1).values
        if self.starts_new_document is not None and self.token_mask is not None:
            self.starts_new_document = self.starts_new_document & self.token_mask.any(1)
        if (
            self.starts_new_document is not None
            and can_read_values(self.starts_new_document)
            and not bool(self.starts_new_document.any())
        ):
            self.starts_new_document = None
        self.starts = self._starts() if self.keeps_starts else None
        self.packing_state = self._packing_state()

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) in columns as given → real tokens first."""
        return x if self.order is None else _take(x, self.order)

    def repad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) with real tokens first → columns as given."""
        return x if self.inverse is None else _take(x, self.inverse)

    def continued(self, states: States) -> States:
        """The states that these tokens go on from: zero in rows that begin a document."""
        if self.starts_new_document is None:
            return states
        return {name: with_zero_rows(state, self.starts_new_document) for name, state in states.items()}

    def first(self, num_tokens: int) -> "PackedRows":
        """The same of the first tokens only, in columns as given."""

        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[:, : x.shape[1] - self.length + num_tokens]

        parts = {name: cut(getattr(self, name)) for name in ("token_mask", "seq_idx", "full_token_mask")}
        return replace(self, length=num_tokens, **parts)

    def to(self, device: torch.device, non_blocking: bool = False) -> "PackedRows":
        """accelerate asks this of what a layer on another device is called with."""
        rows = copy.copy(self)
        rows.__dict__ = tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=non_blocking), vars(self))
        return rows

    def max_documents(self) -> int | None:
        """The most documents that a row of this forward holds; None where each row is one document.

        Where only the values of `seq_idx` tell, this waits for the device: `cu_seq_lens_q` tells by its shape.
        """
        if self.seq_idx is None or self.num_documents is not None:
            return self.num_documents
        return int((self.seq_idx[:, 1:] != self.seq_idx[:, :-1]).sum(1).max()) + 1

    def positions(self, device: torch.device) -> torch.Tensor:
        """(B or 1, L) int64, the real tokens before each token in its document."""
        if self.full_token_mask is None:
            columns = (torch.arange(self.length, device=device) + self.past).unsqueeze(0)
            return columns if self.starts is None else columns - self.starts
        count = self.full_token_mask.cumsum(1)
        positions = count[:, -self.length :] - 1
        if self.starts is not None:
            positions = positions - (count - self.full_token_mask.long()).gather(1, self.starts)
        return positions.clamp(min=0)

    def _starts(self) -> torch.Tensor | None:
        start = self.before.get("start")
        given = [tensor for tensor in (self.seq_idx, self.starts_new_document, start) if tensor is not None]
        if not given:
            return None
        batch, device = given[0].shape[0], given[0].device
        first = torch.zeros(batch, dtype=torch.int64, device=device) if start is None else start
        first = (
            first if self.starts_new_document is None else torch.where(self.starts_new_document, self.past, first)
        ).unsqueeze(1)
        if self.seq_idx is None:
            return first.expand(-1, self.length)
        columns = torch.arange(1, self.length, device=device) + self.past
        later = torch.where(self.seq_idx[:, 1:] != self.seq_idx[:, :-1], columns, 0)
        return torch.cat([first, later], 1).cummax(1).values

    def _packing_state(self) -> States:
        start = None if self.starts is None else self.starts[:, -1]
        packing_state = {"document": self._last_document(), "start": start, "token_mask": self.full_token_mask}
        packing_state["padding"] = self._padding()
        return {name: tensor for name, tensor in packing_state.items() if tensor is not None}

    def _padding(self) -> torch.Tensor | None:
        held = self.before.get("padding")
        if self.token_mask is None:
            return held
        more = signature(~self.token_mask, self.past)
        return more if held is None else held + more

    def _last_document(self) -> torch.Tensor | None:
        last = self.before.get("document")
        if self.has_explicit_seq_idx:
            assert self.seq_idx is not None
            number = 2 * self.seq_idx[:, -1].long() + 1
            return (
                number
                if self.token_mask is None
                else torch.where(self.token_mask.any(1), number, 0 if last is None else last)
            )
        if last is None:
            return None
        if self.seq_idx is not None:
            last = torch.where(self.seq_idx[:, -1] == self.seq_idx[:, 0], last, 0)
        return last if self.starts_new_document is None else torch.where(self.starts_new_document, 0, last)


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


def with_zero_rows(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`state` (B, ...) with zeros in `rows` (B,) bool."""
    return torch.where(rows.to(state.device).view(-1, *[1] * (state.dim() - 1)), torch.zeros_like(state), state)


def resolve_packing(
    shape: torch.Size | tuple[int, ...],
    held: tuple[int | torch.Tensor, States],
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    continues_documents: bool = False,
    keeps_starts: bool = False,
    keeps_padding: bool = False,
    has_states: bool = True,
    mask_name: str = "attention_mask",
) -> PackedRows:
    """The rows of one forward.

    Args:
        shape: (B, L), rows and tokens of this forward.
        held: the tokens before them and their packing state (`cache.tokens_and_packing_state`).
        attention_mask: (B, T), 1 for real tokens and 0 for padding, T = L or all tokens so far.
        position_ids: (B or 1, L) int; without `seq_idx` and `attention_mask`, a position that is not the one before
            plus 1 begins a document, and so does a position of 0 at the front of a piece. (With a mask, positions are
            not used: they also skip padding.)
        seq_idx: (B, L) int, gives the documents explicitly; over pieces, another number than the row's last one
            begins a document.
        cu_seq_lens_q: (N + 1,) int, where the documents of one row begin and end, as FlashAttention takes it.
        continues_documents: the first tokens go on with their rows' documents (steps of `generate`); a single one is
            real, whatever the mask says.
        keeps_starts: the layers need `starts`, in this forward and later.
        keeps_padding: the layers need `full_token_mask`, in this forward and later.
        has_states: some layer has a state, which has read the past as earlier masks said.
        mask_name: of the mask, in messages.

    Raises:
        TypeError, ValueError: an argument of another type, dtype or shape, or documents that contradict each other.
    """
    (batch, length), (past, before) = shape, held
    has_past = not isinstance(past, int) or past > 0
    token_mask = None
    if attention_mask is not None:
        _check_mask_shape(attention_mask, batch, length, past, mask_name)
        if not (continues_documents and length == 1):
            token_mask = _token_mask(attention_mask, length, mask_name)
            if has_states:
                check_past(attention_mask, length, before.get("padding"), mask_name)
    covers = attention_mask is not None and attention_mask.shape[1] > length
    if keeps_padding and has_past and not covers and "token_mask" not in before:
        check_columns_are_known(before.get("padding"), mask_name)
    if position_ids is not None:
        check_position_ids(position_ids, batch, length)
        position_ids = None if attention_mask is not None or position_ids.is_meta else position_ids.expand(batch, -1)
    has_explicit_seq_idx = seq_idx is not None
    seq_idx = _documents(seq_idx, cu_seq_lens_q, position_ids, batch, length)
    if seq_idx is not None and seq_idx.is_meta:  # documents change no shape, and there are no values to find them by
        has_explicit_seq_idx, seq_idx = False, None
    if (
        cu_seq_lens_q is not None
        and not has_explicit_seq_idx
        and position_ids is None
        and has_past
        and not continues_documents
    ):
        raise ValueError(
            "cu_seq_lens_q alone does not say whether a piece continues the document that the cache ends "
            "with: give position_ids or seq_idx too."
        )
    if has_explicit_seq_idx and token_mask is not None:
        seq_idx = _over_padding(seq_idx, token_mask)
    starts_new_document = None
    if has_past and not continues_documents:
        starts_new_document = _starts_new_document(
            seq_idx if has_explicit_seq_idx else None, position_ids, before.get("document")
        )
    return PackedRows(
        length,
        past,
        token_mask,
        seq_idx,
        has_explicit_seq_idx,
        starts_new_document,
        _full_token_mask(attention_mask, token_mask, before.get("token_mask"), past, batch, length)
        if keeps_padding
        else None,
        keeps_starts,
        mask_covers_cache=covers,
        num_documents=None if cu_seq_lens_q is None or has_explicit_seq_idx else len(cu_seq_lens_q) - 1,
        before=before,
    )


def _check_mask_shape(mask: torch.Tensor, batch: int, length: int, past: int | torch.Tensor, name: str) -> None:
    """(B, T), T = L or all tokens so far; where these are not known, T ≥ L will do."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}.")
    have = tuple(mask.shape)
    if len(have) != 2 or have[0] != batch or have[1] < length:
        raise ValueError(f"{name} must have shape (batch, tokens so far) = ({batch}, at least {length}), got {have}.")
    is_known = isinstance(past, int) and not torch.compiler.is_compiling()
    if is_known and have[1] not in (length, past + length):
        raise ValueError(
            f"{name} must have shape (batch, tokens so far) = ({batch}, {past + length}), got {have}: "
            f"{past} tokens are in the cache, {length} are given."
        )


def _token_mask(attention_mask: torch.Tensor, length: int, name: str) -> torch.Tensor | None:
    """(B, L) bool, this forward's tokens that are not padding; None if there is no padding.

    Only a mask that the host can read may turn out to hide nothing: on an accelerator every mask moves tokens, since a
    look at it would stop the queue once a forward.
    """
    attention_mask = attention_mask[:, attention_mask.shape[1] - length :]
    token_mask = attention_mask != 0
    if can_read_values(attention_mask):
        if bool((attention_mask * token_mask != token_mask).any()):
            low, high = (bound.item() for bound in torch.aminmax(attention_mask))
            raise ValueError(
                f"{name} must be 1 for text and 0 for padding, got values from {low} to {high}; documents of a "
                "packed row go to seq_idx, and an additive mask is not understood."
            )
        if bool(token_mask.all()):
            return None
    return token_mask


def _full_token_mask(
    attention_mask: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    before: torch.Tensor | None,
    past: int | torch.Tensor,
    batch: int,
    length: int,
) -> torch.Tensor | None:
    """(B, past + L) the columns that are not padding: of the mask, or the mask after what earlier ones said."""
    if attention_mask is not None and attention_mask.shape[1] > length:
        return attention_mask != 0
    if before is None and token_mask is None:
        return None
    device = (before if token_mask is None else token_mask).device
    if before is None:
        before = torch.ones(batch, int(past), dtype=torch.bool, device=device)
    if token_mask is None:
        token_mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    return torch.cat([before, token_mask], 1)


def _documents(
    seq_idx: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    batch: int,
    length: int,
) -> torch.Tensor | None:
    """(B, L) the documents within this piece."""
    if seq_idx is not None:
        check_seq_idx(seq_idx, batch, length)
        return seq_idx
    if cu_seq_lens_q is not None:
        return _between(cu_seq_lens_q, batch, length)
    if position_ids is None or length == 1:
        return None
    # only now, as it imports transformers' caches, where ours are registered, which need this module
    from transformers.masking_utils import find_packed_sequence_indices

    return find_packed_sequence_indices(position_ids)


def _between(cu_seq_lens_q: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(1, L) the document of each token, from where documents begin and end."""
    if not isinstance(cu_seq_lens_q, torch.Tensor) or cu_seq_lens_q.dtype not in (torch.int32, torch.int64):
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


def _starts_new_document(
    seq_idx: torch.Tensor | None, position_ids: torch.Tensor | None, last: torch.Tensor | None
) -> torch.Tensor | None:
    """(B,) bool, the first token of the piece begins a document; None if no row does."""
    at_zero = None if position_ids is None else position_ids[:, 0] == 0
    if seq_idx is None or last is None:
        return at_zero
    first, known = 2 * seq_idx[:, 0].long() + 1, last != 0
    if can_read_values(first) and bool((known & (first < last)).any()):
        row = int((known & (first < last)).to(torch.uint8).argmax())
        raise ValueError(
            f"seq_idx begins with document {int(seq_idx[row, 0])} in row {row}, but the cache ends with "
            f"document {(int(last[row]) - 1) // 2}: numbers of documents must not decrease from piece to piece."
        )
    return torch.where(known, first != last, False if at_zero is None else at_zero)
