"""Packed rows: the document of each token, in one forward and over the pieces that a cache has read.

Within a piece, `seq_idx`, `cu_seq_lens_q` or positions that restart say where documents begin. Whether the first token
of a piece continues the row's last document depends on its number, or on a position of 0. What later pieces must know
is kept beside the states (`RecurrentStateLayer.notes`):

    document  (B,) int64, 2 seq_idx + 1 of the row's last token; 0 where no seq_idx was given
    start     (B,) int64, the column of all tokens so far where the row's last document begins
    real      (B, T) bool, which columns so far are not padding
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import Cache
from transformers.masking_utils import find_packed_sequence_indices

from hf_hybrid_ssm.models.cache import Recompute, States, is_recurrent_state_layer, tokens_so_far
from hf_hybrid_ssm.models.inputs import check_position_ids
from hf_hybrid_ssm.models.unpadding import Unpadding, check_mask_shape
from hf_hybrid_ssm.ops._core.checks import can_read_values, check_seq_idx


@dataclass(frozen=True)
class PackedRows:
    """The documents of the tokens of one forward.

    Args:
        length: L, tokens of this forward.
        past: tokens before them.
        seq_idx: (B, L) int, never decreasing; None where each row is one document. The first may have begun earlier.
        starts: (B, L) int64, the column of all tokens so far where each token's document begins; None where that is 0.
        real: (B, past + L) bool, the columns so far that are not padding; None where all are real.
        begins: (B,) bool, the row's first token begins a document though the cache holds tokens; None if no row does.
        notes_after: n → the notes after the first n tokens.
        waiting_after: n → (B,) bool, rows that begin a document, but not with one of the first n columns, which are
            padding; None where no row does both.
        covers_past: the attention mask was one of all tokens so far.
        num_documents: of the row, where the caller said so.
    """

    length: int
    past: int | torch.Tensor
    seq_idx: torch.Tensor | None
    starts: torch.Tensor | None = None
    real: torch.Tensor | None = None
    begins: torch.Tensor | None = None
    notes_after: Recompute | None = None
    waiting_after: Callable[[int], torch.Tensor] | None = None
    covers_past: bool = False
    num_documents: int | None = None

    def open(self, past_key_values: Cache | None) -> None:
        """Before the layers: rows that begin a document start from zeros, and what later pieces need will be kept.

        Raises:
            ValueError: what would be needed was not kept, since a model with only full attention has no states.
        """
        if past_key_values is None:
            return
        layers = [layer for layer in past_key_values.layers if is_recurrent_state_layer(layer)]
        for layer in layers:
            layer.open(self.begins, self.notes_after, self.waiting_after)
        if not layers:
            _check_without_states(past_key_values, self)

    def most_documents(self) -> int | None:
        """The most documents that a row of this forward holds; None where each row is one document.

        Where only the values of `seq_idx` tell, this waits for the device: `cu_seq_lens_q` tells by its shape.
        """
        if self.seq_idx is None or self.num_documents is not None:
            return self.num_documents
        return int((self.seq_idx[:, 1:] != self.seq_idx[:, :-1]).sum(1).max()) + 1

    def positions(self, device: torch.device) -> torch.Tensor:
        """(B or 1, L) int64, the real tokens before each token in its document."""
        if self.real is None:
            columns = (torch.arange(self.length, device=device) + self.past).unsqueeze(0)
            return columns if self.starts is None else columns - self.starts
        count = self.real.cumsum(1)
        positions = count[:, -self.length :] - 1
        if self.starts is not None:
            positions = positions - (count - self.real.long()).gather(1, self.starts)
        return positions.clamp(min=0)


def resolve_packing(
    seq_idx: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    unpadding: Unpadding | None,
    past_key_values: Cache | None,
    batch: int,
    length: int,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    continues_documents: bool = False,
    keeps_columns: bool = False,
    keeps_padding: bool = False,
) -> PackedRows:
    """The documents of this forward.

    Args:
        seq_idx: (B, L) int, gives it explicitly; over pieces, another number than the row's last one begins a
            document.
        position_ids: (B or 1, L) int; without `seq_idx` and `attention_mask`, a position that is not the one before
            plus 1 begins a document, and so does a position of 0 at the front of a piece. (With a mask, positions are
            not used: they also skip padding.)
        attention_mask: (B, T), nonzero for real tokens, T = L or all tokens so far.
        unpadding: what `unpadding_of` made of the mask.
        cu_seq_lens_q: (N + 1,) int, where the documents of one row begin and end, as FlashAttention takes it.
        continues_documents: the first tokens go on with their rows' documents (steps of `generate`).
        keeps_columns: the layers need `starts`, in this forward and later.
        keeps_padding: the layers need `real`, in this forward and later.

    Raises:
        TypeError, ValueError: an argument of another type, dtype or shape, documents that contradict each other, or
            something that cannot be known from a cache without states.
    """
    past = tokens_so_far(past_key_values)
    if attention_mask is not None and not torch.compiler.is_compiling():
        check_mask_shape(attention_mask, batch, length, past if isinstance(past, int) else None)
    if position_ids is not None:
        check_position_ids(position_ids, batch, length)
        position_ids = None if attention_mask is not None or position_ids.is_meta else position_ids.expand(batch, -1)
    has_past = not isinstance(past, int) or past > 0
    current = None if unpadding is None else unpadding.real
    numbered = seq_idx is not None
    seq_idx = _documents(seq_idx, cu_seq_lens_q, position_ids, batch, length)
    if seq_idx is not None and seq_idx.is_meta:  # documents change no shape, and there are no values to find them by
        numbered, seq_idx = False, None
    if cu_seq_lens_q is not None and not numbered and position_ids is None and has_past and not continues_documents:
        raise ValueError(
            "cu_seq_lens_q alone does not say whether a piece continues the document that past_key_values ends "
            "with: give position_ids or seq_idx too."
        )
    if numbered and current is not None:
        seq_idx = _over_padding(seq_idx, current)
    notes = _notes(past_key_values)
    begins = None
    if has_past and not continues_documents:
        begins = _begins(seq_idx if numbered else None, position_ids, notes.get("document"))
        if begins is not None and current is not None:
            begins = begins & current.any(1)
        if begins is not None and can_read_values(begins) and not bool(begins.any()):
            begins = None
    packed = PackedRows(
        length,
        past,
        seq_idx,
        _starts(seq_idx, begins, notes.get("start"), past, batch, length) if keeps_columns else None,
        _real(attention_mask, current, notes.get("real"), past, batch, length) if keeps_padding else None,
        begins,
        covers_past=attention_mask is not None and attention_mask.shape[1] > length,
        num_documents=None if cu_seq_lens_q is None or numbered else len(cu_seq_lens_q) - 1,
    )

    def notes_after(num_tokens: int) -> States:
        after: States = {}
        if packed.starts is not None:
            after["start"] = packed.starts[:, num_tokens - 1]
            if waiting_after is not None:
                before = notes.get("start", torch.zeros_like(after["start"]))
                after["start"] = torch.where(waiting_after(num_tokens), before, after["start"])
        if packed.real is not None:
            after["real"] = packed.real[:, : packed.real.shape[1] - length + num_tokens]
        document = _last_document(seq_idx, numbered, begins, notes.get("document"), current, num_tokens)
        return after if document is None else after | {"document": document}

    waiting_after = None
    if begins is not None and current is not None:

        def waiting_after(num_tokens: int) -> torch.Tensor:
            return begins & ~current[:, :num_tokens].any(1)

    return replace(packed, notes_after=notes_after, waiting_after=waiting_after)


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


def _over_padding(seq_idx: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Padding belongs to the document before it, at the front of a row to the first one."""
    first = seq_idx.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
    return torch.where(real, seq_idx, first).cummax(1).values


def _begins(
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
            f"seq_idx begins with document {int(seq_idx[row, 0])} in row {row}, but past_key_values ends with "
            f"document {(int(last[row]) - 1) // 2}: numbers of documents must not decrease from piece to piece."
        )
    return torch.where(known, first != last, False if at_zero is None else at_zero)


def _starts(
    seq_idx: torch.Tensor | None,
    begins: torch.Tensor | None,
    start: torch.Tensor | None,
    past: int | torch.Tensor,
    batch: int,
    length: int,
) -> torch.Tensor | None:
    """(B, L) the column where each token's document begins."""
    given = [tensor for tensor in (seq_idx, begins, start) if tensor is not None]
    if not given:
        return None
    device = given[0].device
    first = torch.zeros(batch, dtype=torch.int64, device=device) if start is None else start
    first = (first if begins is None else torch.where(begins, past, first)).unsqueeze(1)
    if seq_idx is None:
        return first.expand(-1, length)
    columns = torch.arange(1, length, device=device) + past
    later = torch.where(seq_idx[:, 1:] != seq_idx[:, :-1], columns, 0)
    return torch.cat([first, later], 1).cummax(1).values


def _real(
    attention_mask: torch.Tensor | None,
    current: torch.Tensor | None,
    before: torch.Tensor | None,
    past: int | torch.Tensor,
    batch: int,
    length: int,
) -> torch.Tensor | None:
    """(B, past + L) the columns that are not padding: of the mask, or the mask after what earlier ones said."""
    if attention_mask is not None and attention_mask.shape[1] > length:
        return attention_mask != 0
    if before is None and current is None:
        return None
    device = (before if current is None else current).device
    if before is None:
        before = torch.ones(batch, int(past), dtype=torch.bool, device=device)
    if current is None:
        current = torch.ones(batch, length, dtype=torch.bool, device=device)
    return torch.cat([before, current], 1)


def _notes(past_key_values: Cache | None) -> States:
    """Those of the first layer that has tokens: all layers hold the same."""
    for layer in () if past_key_values is None else past_key_values.layers:
        if is_recurrent_state_layer(layer) and layer.is_initialized:
            return layer.notes
    return {}


def _last_document(
    seq_idx: torch.Tensor | None,
    numbered: bool,
    begins: torch.Tensor | None,
    last: torch.Tensor | None,
    current: torch.Tensor | None,
    num_tokens: int,
) -> torch.Tensor | None:
    """(B,) the note "document" after the first tokens of a piece, from the one before."""
    if numbered:
        assert seq_idx is not None
        number = 2 * seq_idx[:, num_tokens - 1].long() + 1
        if current is None:
            return number
        return torch.where(current[:, :num_tokens].any(1), number, 0 if last is None else last)
    if last is None:
        return None
    if seq_idx is not None:
        last = torch.where(seq_idx[:, num_tokens - 1] == seq_idx[:, 0], last, 0)
    return last if begins is None else torch.where(begins, 0, last)


def _check_without_states(past_key_values: Cache, packed: PackedRows) -> None:
    """Keys and values alone have no place for notes: pieces that would need them are refused."""
    layer = past_key_values.layers[0]
    unkept: States = getattr(layer, "unkept", {})
    if not isinstance(packed.past, int) or packed.past > 0:
        _refuse(unkept.get("documents"), "several documents of packed rows", "read packed rows at once")
        if not packed.covers_past:
            _refuse(unkept.get("padding"), "padding", "give an attention_mask of all tokens so far")
    layer.unkept = {}
    if packed.starts is not None:
        layer.unkept["documents"] = (packed.starts[:, -1] > 0).any()
    if packed.real is not None:
        layer.unkept["padding"] = ~packed.real.all()


def _refuse(is_held: torch.Tensor | None, what: str, remedy: str) -> None:
    if is_held is None:
        return
    message = (
        f"past_key_values holds {what}, and a model with only full attention does not keep where: {remedy}, or use a "
        "new cache."
    )
    if not can_read_values(is_held):
        torch._assert_async(~is_held, message)
    elif bool(is_held):
        raise ValueError(message)
