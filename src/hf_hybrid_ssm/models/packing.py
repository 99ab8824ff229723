"""Rows as layers see them: without padding, and split into documents.

**Padding.** A row's real tokens are moved to its front, so that every layer sees the row as if it were alone. One code
path then serves left, right and scattered padding, in the first forward and in every later one: windows, blocks and
decays count real tokens only, and a state passes padding unchanged.

**Documents.** Within a piece, `seq_idx`, `cu_seq_lens_q` or positions that restart say where documents begin. Whether
the first token of a later piece continues the row's last document is decided by its `seq_idx`: the number of the last
token continues, another begins a document. Without `seq_idx`, a position of 0 begins one. What later pieces must know
is cached with the states (`RecurrentStateLayer.packing_state`):

    document    (B,) int64, 2 seq_idx + 1 of the row's last token; 0 where no seq_idx was given
    padding     (B,) int64, which columns so far are padding, in one number (`signature`); None where there was none

Layers that attend to single columns need more: `columns.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from hf_hybrid_ssm.models.inputs import check_position_ids, refuse_where
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.rows import Documents, Padding, Rows
from hf_hybrid_ssm.ops.core.transforms import is_transforming

States = dict[str, torch.Tensor]
MULTIPLIERS = (-7046029254386353131, -4417276706812531889)  # odd, as signed 64-bit integers


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows(Rows):
    """The rows of one forward of a model, and where they lie among the tokens so far; made by `packed_rows`.

    Args:
        length: L, tokens of this forward.
        past: tokens before them.
        starts_new_document: (B,) bool, the row's first real token begins a document though the cache holds tokens;
            None if no row does.
        before: `packing_state` of the piece before.
        packing_state: what the next piece must know.
    """

    length: int
    past: int | torch.Tensor = 0
    starts_new_document: torch.Tensor | None = None
    before: States = field(default_factory=dict)
    packing_state: States = field(default_factory=dict)

    @property
    def token_mask(self) -> torch.Tensor | None:
        """(B, L) bool, the tokens in columns as given that are not padding; None where all are real."""
        return None if self.padding is None else self.padding.token_mask

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) in columns as given → real tokens first."""
        return x if self.padding is None else self.padding.unpad(x)

    def repad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) with real tokens first → columns as given."""
        return x if self.padding is None else self.padding.repad(x)

    def continued(self, states: States) -> States:
        """The states that these tokens go on from: zero in rows that begin a document."""
        if self.starts_new_document is None:
            return states
        return {name: with_zero_rows(state, self.starts_new_document) for name, state in states.items()}

    def first(self, num_tokens: int) -> "PackedRows":
        """The same of the first tokens only, in columns as given."""
        given = {name: getattr(self, name) for name in GIVEN}
        padding, documents = self.padding, self.documents
        if padding is not None and padding.token_mask is not None:
            padding = Padding.from_token_mask(padding.token_mask[:, :num_tokens])
        if documents is not None:
            known = {"count": documents.count, "is_numbered": documents.is_numbered}
            documents = Documents.without_padding(documents.of_columns[:, :num_tokens], padding, **known)
        given |= {"length": num_tokens, "padding": padding, "documents": documents}
        return replace(packed_rows(**given), is_step=False)  # a layer reads them again as part of a longer piece


FOLLOWING = ("packing_state", "is_step", "overwrites_states")
"""The fields of `PackedRows` that follow from the others, `GIVEN`."""
GIVEN = tuple(field.name for field in fields(PackedRows) if field.name not in FOLLOWING)


def packed_rows(*, may_overwrite: Callable[[], bool] | None = None, **given: Any) -> PackedRows:
    """Rows from what was found out about them, and what follows from it.

    Args:
        may_overwrite: asked of a step, whether it may overwrite the states; None: it may not.
        given: as of `PackedRows`; a row of `starts_new_document` that reads only padding does not begin one yet.
    """
    if given.get("starts_new_document") is not None:
        given["starts_new_document"] = _rows_that_begin(given["starts_new_document"], given.get("padding"))
    rows = PackedRows(**given)
    packing_state = {"document": _last_document(rows), "padding": _padding_so_far(rows)}
    # one real token in every row, of the document before it or of its own
    is_one = rows.length == 1 and rows.padding is None and rows.documents is None
    is_step = is_one and (not isinstance(rows.past, int) or rows.past > 0)
    is_step = is_step and not torch.is_grad_enabled() and not is_transforming()
    return PackedRows(
        **given,
        packing_state={name: tensor for name, tensor in packing_state.items() if tensor is not None},
        is_step=is_step,
        overwrites_states=is_step and may_overwrite is not None and may_overwrite(),
    )


def with_zero_rows(state: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """`state` (B, ...) with zeros in the rows where `begins` (B,) is true."""
    return torch.where(begins.to(state.device).view(-1, *[1] * (state.dim() - 1)), torch.zeros_like(state), state)


def resolve_packing(
    shape: torch.Size | tuple[int, ...],
    cached: tuple[int | torch.Tensor, States],
    *,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    continues_documents: bool = False,
    counts_documents: bool = False,
    has_states: bool = True,
    mask_name: str = "attention_mask",
    **others: Any,
) -> PackedRows:
    """The rows of one forward.

    Args:
        shape: (B, L), rows and tokens of this forward.
        cached: the tokens before them and their packing state (`cache.tokens_and_packing_state`).
        attention_mask: (B, T), 1 for real tokens and 0 for padding, T = L or all tokens so far.
        position_ids: (B or 1, L) int; without `seq_idx` and `attention_mask`, a position that is not the one before
            plus 1 begins a document, and so does a position of 0 at the front of a piece. (With a mask, positions are
            not used: they also skip padding.)
        seq_idx: (B, L) int, gives the documents explicitly; over pieces, another number than the row's last one
            begins a document.
        cu_seq_lens_q: (N + 1,) int, where the documents of one row begin and end, as FlashAttention takes it.
        continues_documents: the first tokens go on with their rows' documents (steps of `generate`); a single one is
            real, whatever the mask says.
        counts_documents: the layers need to know how many documents a row holds at most.
        has_states: some layer has a state, which has read the past as earlier masks said.
        mask_name: of the mask, in messages.
        others: as of `packed_rows`.

    Raises:
        TypeError, ValueError: an argument of another type, dtype or shape, or documents that contradict each other.
    """
    (batch, length), (past, before) = shape, cached
    has_past = not isinstance(past, int) or past > 0
    padding = None
    if attention_mask is not None:
        _check_mask_shape(attention_mask, batch, length, past, mask_name)
        if not (continues_documents and length == 1):
            padding = Padding.from_mask(attention_mask[:, attention_mask.shape[1] - length :], mask_name)
            if has_states:
                check_past(attention_mask, length, before.get("padding"), mask_name)
    if position_ids is not None:
        check_position_ids(position_ids, batch, length)
        is_read = attention_mask is None and not position_ids.is_meta
        position_ids = position_ids.expand(batch, -1) if is_read else None
    if cu_seq_lens_q is not None and seq_idx is None and position_ids is None and has_past and not continues_documents:
        raise ValueError(
            "cu_seq_lens_q alone does not say whether a piece continues the document that the cache ends "
            "with: give position_ids or seq_idx too."
        )
    is_told = seq_idx is not None or cu_seq_lens_q is not None
    restarts = None if is_told or position_ids is None or length == 1 else _restarts(position_ids)
    told = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q, "restarts": restarts}
    documents = Documents.from_inputs(batch, length, **told, padding=padding)
    if documents is not None and counts_documents:
        documents = documents.counted()
    starts_new_document = None
    if has_past and not continues_documents:
        numbers = documents.of_columns if documents is not None and documents.is_numbered else None
        starts_new_document = _starts_new_document(numbers, position_ids, before.get("document"))
    return packed_rows(
        length=length,
        past=past,
        padding=padding,
        documents=documents,
        starts_new_document=starts_new_document,
        before=before,
        **others,
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


def _restarts(position_ids: torch.Tensor) -> torch.Tensor | None:
    """(B, L) the document of each token, where positions begin again; None where they do not."""
    # only now, as it imports transformers' caches, where ours are registered, which need this module
    from transformers.masking_utils import find_packed_sequence_indices

    return find_packed_sequence_indices(position_ids)


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


def _rows_that_begin(starts_new_document: torch.Tensor, padding: Padding | None) -> torch.Tensor | None:
    """(B,) bool, None if no row begins a document; a row that reads only padding does not yet."""
    if padding is not None and padding.token_mask is not None:
        starts_new_document = starts_new_document & padding.token_mask.any(1)
    if can_read_values(starts_new_document) and not bool(starts_new_document.any()):
        return None
    return starts_new_document


def _padding_so_far(rows: PackedRows) -> torch.Tensor | None:
    """`padding` of the packing state."""
    before = rows.before.get("padding")
    if rows.token_mask is None:
        return before
    more = signature(~rows.token_mask, rows.past)
    return more if before is None else before + more


def _last_document(rows: PackedRows) -> torch.Tensor | None:
    """`document` of the packing state."""
    last, documents = rows.before.get("document"), rows.documents
    if documents is not None and documents.is_numbered:
        number = 2 * documents.of_columns[:, -1].long() + 1
        if rows.token_mask is None:
            return number
        return torch.where(rows.token_mask.any(1), number, 0 if last is None else last)
    if last is None:
        return None
    if documents is not None:
        seq_idx = documents.of_columns
        last = torch.where(seq_idx[:, -1] == seq_idx[:, 0], last, 0)
    return last if rows.starts_new_document is None else torch.where(rows.starts_new_document, 0, last)


def signature(padded: torch.Tensor, first: int | torch.Tensor = 0) -> torch.Tensor:
    """(B, L) bool, where True is padding, of the columns from `first` on → (B,) int64: the sum over the padded columns
    of a hash of each, modulo 2^64. It is 0 where there was none, whatever pieces the text was read in."""
    columns = torch.arange(1, padded.shape[1] + 1, device=padded.device) + first
    hashed = columns * MULTIPLIERS[0]
    hashed = (hashed ^ (hashed >> 31)) * MULTIPLIERS[1]
    return torch.where(padded, hashed ^ (hashed >> 29), 0).sum(1)


def check_past(mask: torch.Tensor, length: int, known: torch.Tensor | None, name: str) -> None:
    """A mask (B, past + L) that covers the past must call the same columns padding as the forwards that read them: a
    state has read what was called text and has passed over what was called padding, and neither can be undone.

    Args:
        known: (B,) int64, the `signature` of the padding that was read; None where there was none.

    Raises:
        ValueError: it does not; on an accelerator, where values are not read, an assertion of the device.
    """
    if mask.shape[1] <= length or mask.is_meta or torch.compiler.is_compiling():
        return
    padded = mask[:, : mask.shape[1] - length] == 0
    differs = padded.any(1) if known is None else signature(padded) != known
    message = (
        f"{name} calls other columns of the past padding than the forwards that read them: states cannot forget "
        "what they read, nor read what they passed over. Give the mask that the tokens were read with (0 for what "
        "`generate` appends after a row's end), or use a new cache."
    )
    if can_read_values(differs) and bool(differs.any()):
        message = f"row {int(differs.to(torch.uint8).argmax())} of {message}"
    refuse_where(differs.any(), message)
