# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 1f462656e843d71a975c6c5d40365cd99adb95f459ca87cfb077eb3d758dcf07

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import (
    Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel, initialization as init,
)
from transformers.cache_utils import CacheLayerMixin, STATIC_LAYER_TYPE_MAPPING
from transformers.modeling_layers import GenericForQuestionAnswering, GenericForTokenClassification
from transformers.modeling_outputs import (
    BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput, MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput, SequenceClassifierOutputWithPast, TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_spade import STATE_LAYER_TYPE, WINDOW_LAYER_TYPE
from .dispatch import can_read_values, check_seq_idx, is_transforming
from .linear_cross_entropy import linear_cross_entropy
from .mixers import Float32ParametersMixin


# ---- models/inputs.py -----------------------------------------------------------------------------------------------
# Checks of every model's inputs, before the first layer.

INTEGERS = (torch.int32, torch.int64)


def check_token_ids(name: str, ids: torch.Tensor, vocab_size: int, *, ignore_index: int | None = None) -> None:
    """Token ids must be integers within the vocabulary (checked on CPU only, where reading values is cheap).

    Raises:
        TypeError: `ids` is not an integer tensor.
        ValueError: an id is outside of 0 … vocab_size - 1 (and not `ignore_index`).
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of token ids, got {type(ids).__name__}.")
    if ids.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int32 or int64 token ids, got {ids.dtype}.")
    if not can_read_values(ids) or ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if ignore_index is not None and low == ignore_index:
        low = int(ids.masked_fill(ids == ignore_index, 0).min())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} has ids from {low} to {high}, but the model's vocab_size is {vocab_size}: the tokenizer and the "
            "model do not belong together."
        )


def check_labels(labels: torch.Tensor, vocab_size: int, shape: tuple[int, int] | None) -> None:
    """Token ids to predict, -100 to ignore a position; of the input's `shape`, if that is known.

    Raises:
        TypeError: `labels` is not an integer tensor.
        ValueError: another shape, or an id outside the vocabulary.
    """
    check_token_ids("labels", labels, vocab_size, ignore_index=-100)
    if shape is None and labels.dim() != 2:
        raise ValueError(f"labels must have shape (batch, length), got {tuple(labels.shape)}.")
    if shape is not None:
        _check_shape(labels, shape)


def check_class_labels(labels: torch.Tensor, logits: torch.Tensor, problem_type: str | None) -> None:
    """The labels of a classifier with `logits` (B, C): class indices (B,), or values if it is not a single choice.

    Raises:
        TypeError: `labels` is not a tensor, or class indices are not integers.
        ValueError: wrong shape, or a class index outside of 0 … C - 1.
    """
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")
    batch, classes = logits.shape
    integers = labels.dtype in INTEGERS
    if problem_type is None:
        problem_type = "single_label_classification" if integers else "multi_label_classification"
        problem_type = "regression" if classes == 1 else problem_type
    if problem_type != "single_label_classification":
        if labels.numel() != batch * classes:
            raise ValueError(
                f"labels must have shape (batch, num_labels) = ({batch}, {classes}) for {problem_type}, got "
                f"{tuple(labels.shape)}."
            )
        return
    if not integers:
        raise TypeError(f"labels must be int32 or int64 class indices for {problem_type}, got {labels.dtype}.")
    if labels.numel() != batch:
        raise ValueError(f"labels must have shape (batch,) = ({batch},), got {tuple(labels.shape)}.")
    _check_classes(labels, classes)


def check_token_classes(labels: torch.Tensor, shape: tuple[int, int], classes: int) -> None:
    """A class 0 … C - 1 for each token of the input's `shape`, -100 to ignore it.

    Raises:
        TypeError: `labels` is not an integer tensor.
        ValueError: another shape, or a class that does not exist.
    """
    _check_integers("labels", labels)
    _check_shape(labels, shape)
    _check_classes(labels, classes)


def check_span(start_positions: torch.Tensor | None, end_positions: torch.Tensor | None, batch: int) -> None:
    """Both ends of each row's span, or neither; a position beyond the row's end is ignored, as in transformers.

    Raises:
        TypeError: one is not an integer tensor.
        ValueError: one is missing, has another shape than (B,) or (B, 1), or a negative position.
    """
    if start_positions is None and end_positions is None:
        return
    for name, positions in (("start_positions", start_positions), ("end_positions", end_positions)):
        if positions is None:
            raise ValueError(f"{name} is missing: a loss needs both start_positions and end_positions.")
        _check_integers(name, positions)
        if positions.shape not in ((batch,), (batch, 1)):
            raise ValueError(f"{name} must have shape (batch,) = ({batch},), got {tuple(positions.shape)}.")
        if can_read_values(positions) and bool((positions < 0).any()):
            raise ValueError(f"{name} must be at least 0, got {int(positions.min())}.")


def _check_integers(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype not in INTEGERS:
        have = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {have}.")


def _check_shape(labels: torch.Tensor, shape: tuple[int, int]) -> None:
    if labels.shape != shape:
        raise ValueError(
            f"labels must have the input's shape (batch, length) = {tuple(shape)}, got {tuple(labels.shape)}."
        )


def _check_classes(labels: torch.Tensor, classes: int) -> None:
    if can_read_values(labels) and bool(((labels < 0) & (labels != -100) | (labels >= classes)).any()):
        raise ValueError(
            f"labels has classes from {int(labels.min())} to {int(labels.max())}, but num_labels={classes}: they must "
            f"lie in 0..{classes - 1}, or be -100."
        )


def check_inputs(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    vocab_size: int,
    hidden_size: int,
    prefix: str = "",
) -> None:
    """Exactly one of `input_ids` (B, L) and `inputs_embeds` (B, L, hidden_size), with at least one row and one token.

    `prefix` stands before their names in messages.

    Raises:
        TypeError: `input_ids` are not integers.
        ValueError: none or both given, wrong shape, no row or token, or ids outside the vocabulary.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"You must specify exactly one of {prefix}input_ids or {prefix}inputs_embeds.")
    for name, given in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds)):
        if given is not None and not isinstance(given, torch.Tensor):
            raise TypeError(f"{prefix}{name} must be a tensor, got {type(given).__name__}.")
    if input_ids is not None:
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"{prefix}input_ids must have shape (batch ≥ 1, length ≥ 1), got {tuple(input_ids.shape)}."
            )
        check_token_ids(f"{prefix}input_ids", input_ids, vocab_size)
    elif inputs_embeds.dim() != 3 or 0 in inputs_embeds.shape[:2] or inputs_embeds.shape[2] != hidden_size:
        raise ValueError(
            f"{prefix}inputs_embeds must have shape (batch ≥ 1, length ≥ 1, {hidden_size}), got "
            f"{tuple(inputs_embeds.shape)}."
        )
    elif not inputs_embeds.is_floating_point():
        raise TypeError(
            f"{prefix}inputs_embeds must be floating point, got {inputs_embeds.dtype}; token ids go to input_ids."
        )


def check_position_ids(position_ids: torch.Tensor, batch: int, length: int) -> None:
    """`position_ids` (B or 1, L) integer.

    Raises:
        TypeError: not an integer tensor.
        ValueError: another shape.
    """
    _check_integers("position_ids", position_ids)
    if position_ids.shape != (batch, length) and position_ids.shape != (1, length):
        raise ValueError(
            f"position_ids must have shape (batch or 1, length) = ({batch}, {length}), got "
            f"{tuple(position_ids.shape)}."
        )


# ---- models/packing.py ----------------------------------------------------------------------------------------------
# Rows as layers see them: without padding, and split into documents.
#
# **Padding.** A row's real tokens are moved to its front, so that every layer sees the row as if it were alone. One code
# path then serves left, right and scattered padding, in the first forward and in every later one: windows, blocks and
# decays count real tokens only, and a state passes padding unchanged.
#
# **Documents.** Within a piece, `seq_idx`, `cu_seq_lens_q` or positions that restart say where documents begin. Whether
# the first token of a piece continues the row's last document depends on its number, or on a position of 0. What later
# pieces must know is kept beside the states (`RecurrentStateLayer.notes`):
#
#     document  (B,) int64, 2 seq_idx + 1 of the row's last token; 0 where no seq_idx was given
#     start     (B,) int64, the column of all tokens so far where the row's last document begins
#     real      (B, T) bool, which columns so far are not padding

States = dict[str, torch.Tensor]


@dataclass(eq=False)
class PackedRows:
    """Padding and documents of the tokens of one forward; by default there is no padding, and a row is one document.

    Args:
        length: L, tokens of this forward.
        past: tokens before them.
        real: (B, L) bool, the tokens that are not padding; None where all are real.
        seq_idx: (B, L) int, never decreasing; None where each row is one document. The first may have begun earlier.
        is_numbered: the caller gave these numbers, which then go on from piece to piece.
        begins: (B,) bool, the row's first real token begins a document though the cache holds tokens; None if no row
            does.
        real_so_far: (B, past + L) bool, the columns so far that are not padding; None where all are real, or where
            the layers do not need it.
        keeps_starts: the layers need `starts`, in this forward and later.
        covers_past: the attention mask was one of all tokens so far.
        num_documents: of the row, where the caller said so.
        before: the notes of the piece before.

    Attributes:
        order: (B, L) int64, `order[b, i]` is the column of the i-th token of the unpadded row b: real tokens come
            first and keep their order, padding follows. None without padding, like the next two.
        inverse: (B, L) int64, the inverse permutation.
        lengths: (B,) int64, real tokens of each row.
        unpadded_seq_idx: (B, L), `seq_idx` in the order of the unpadded rows.
        starts: (B, L) int64, the column of all tokens so far where each token's document begins; None where that is 0.
        notes: what the next piece must know.
    """

    length: int
    past: int | torch.Tensor = 0
    real: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    is_numbered: bool = False
    begins: torch.Tensor | None = None
    real_so_far: torch.Tensor | None = None
    keeps_starts: bool = False
    covers_past: bool = False
    num_documents: int | None = None
    before: States = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = self.inverse = self.lengths = None
        self.unpadded_seq_idx = self.seq_idx
        if self.real is not None:
            self.order = torch.argsort((~self.real).to(torch.uint8), dim=1, stable=True)
            self.inverse = torch.argsort(self.order, dim=1)
            self.lengths = self.real.sum(1)
            if self.seq_idx is not None:  # padding now follows the last document: let it belong there
                self.unpadded_seq_idx = self.unpad(self.seq_idx).cummax(1).values
        if self.begins is not None and self.real is not None:
            self.begins = self.begins & self.real.any(1)
        if self.begins is not None and can_read_values(self.begins) and not bool(self.begins.any()):
            self.begins = None
        self.starts = self._starts() if self.keeps_starts else None
        self.notes = self._notes()

    @property
    def is_step(self) -> bool:
        """One real token a row, of the document before it or of its own."""
        return self.length == 1 and self.real is None and self.seq_idx is None

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) in columns as given → real tokens first."""
        return x if self.order is None else _take(x, self.order)

    def repad(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, ...) with real tokens first → columns as given."""
        return x if self.inverse is None else _take(x, self.inverse)

    def continued(self, states: States) -> States:
        """The states that these tokens go on from: zero in rows that begin a document."""
        if self.begins is None:
            return states
        return {name: with_zero_rows(state, self.begins) for name, state in states.items()}

    def first(self, num_tokens: int) -> "PackedRows":
        """The same of the first tokens only, in columns as given."""

        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[:, : x.shape[1] - self.length + num_tokens]

        parts = {name: cut(getattr(self, name)) for name in ("real", "seq_idx", "real_so_far")}
        return replace(self, length=num_tokens, **parts)

    def to(self, device: torch.device, non_blocking: bool = False) -> "PackedRows":
        """accelerate asks this of what a layer on another device is called with."""
        rows = copy.copy(self)
        rows.__dict__ = tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=non_blocking), vars(self))
        return rows

    def most_documents(self) -> int | None:
        """The most documents that a row of this forward holds; None where each row is one document.

        Where only the values of `seq_idx` tell, this waits for the device: `cu_seq_lens_q` tells by its shape.
        """
        if self.seq_idx is None or self.num_documents is not None:
            return self.num_documents
        return int((self.seq_idx[:, 1:] != self.seq_idx[:, :-1]).sum(1).max()) + 1

    def positions(self, device: torch.device) -> torch.Tensor:
        """(B or 1, L) int64, the real tokens before each token in its document."""
        if self.real_so_far is None:
            columns = (torch.arange(self.length, device=device) + self.past).unsqueeze(0)
            return columns if self.starts is None else columns - self.starts
        count = self.real_so_far.cumsum(1)
        positions = count[:, -self.length :] - 1
        if self.starts is not None:
            positions = positions - (count - self.real_so_far.long()).gather(1, self.starts)
        return positions.clamp(min=0)

    def _starts(self) -> torch.Tensor | None:
        start = self.before.get("start")
        given = [tensor for tensor in (self.seq_idx, self.begins, start) if tensor is not None]
        if not given:
            return None
        batch, device = given[0].shape[0], given[0].device
        first = torch.zeros(batch, dtype=torch.int64, device=device) if start is None else start
        first = (first if self.begins is None else torch.where(self.begins, self.past, first)).unsqueeze(1)
        if self.seq_idx is None:
            return first.expand(-1, self.length)
        columns = torch.arange(1, self.length, device=device) + self.past
        later = torch.where(self.seq_idx[:, 1:] != self.seq_idx[:, :-1], columns, 0)
        return torch.cat([first, later], 1).cummax(1).values

    def _notes(self) -> States:
        start = None if self.starts is None else self.starts[:, -1]
        notes = {"document": self._last_document(), "start": start, "real": self.real_so_far}
        return {name: note for name, note in notes.items() if note is not None}

    def _last_document(self) -> torch.Tensor | None:
        last = self.before.get("document")
        if self.is_numbered:
            assert self.seq_idx is not None
            number = 2 * self.seq_idx[:, -1].long() + 1
            return number if self.real is None else torch.where(self.real.any(1), number, 0 if last is None else last)
        if last is None:
            return None
        if self.seq_idx is not None:
            last = torch.where(self.seq_idx[:, -1] == self.seq_idx[:, 0], last, 0)
        return last if self.begins is None else torch.where(self.begins, 0, last)


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
    mask_name: str = "attention_mask",
) -> PackedRows:
    """The rows of one forward.

    Args:
        shape: (B, L), rows and tokens of this forward.
        held: the tokens before them, and what is noted about these (`cache.tokens_and_notes`).
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
        keeps_padding: the layers need `real_so_far`, in this forward and later.
        mask_name: of the mask, in messages.

    Raises:
        TypeError, ValueError: an argument of another type, dtype or shape, or documents that contradict each other.
    """
    (batch, length), (past, before) = shape, held
    has_past = not isinstance(past, int) or past > 0
    real = None
    if attention_mask is not None:
        _check_mask_shape(attention_mask, batch, length, past, mask_name)
        if not (continues_documents and length == 1):
            real = _real_tokens(attention_mask, length, mask_name)
    if position_ids is not None:
        check_position_ids(position_ids, batch, length)
        position_ids = None if attention_mask is not None or position_ids.is_meta else position_ids.expand(batch, -1)
    is_numbered = seq_idx is not None
    seq_idx = _documents(seq_idx, cu_seq_lens_q, position_ids, batch, length)
    if seq_idx is not None and seq_idx.is_meta:  # documents change no shape, and there are no values to find them by
        is_numbered, seq_idx = False, None
    if cu_seq_lens_q is not None and not is_numbered and position_ids is None and has_past and not continues_documents:
        raise ValueError(
            "cu_seq_lens_q alone does not say whether a piece continues the document that past_key_values ends "
            "with: give position_ids or seq_idx too."
        )
    if is_numbered and real is not None:
        seq_idx = _over_padding(seq_idx, real)
    begins = None
    if has_past and not continues_documents:
        begins = _begins(seq_idx if is_numbered else None, position_ids, before.get("document"))
    return PackedRows(
        length,
        past,
        real,
        seq_idx,
        is_numbered,
        begins,
        _real_so_far(attention_mask, real, before.get("real"), past, batch, length) if keeps_padding else None,
        keeps_starts,
        covers_past=attention_mask is not None and attention_mask.shape[1] > length,
        num_documents=None if cu_seq_lens_q is None or is_numbered else len(cu_seq_lens_q) - 1,
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


def _real_tokens(attention_mask: torch.Tensor, length: int, name: str) -> torch.Tensor | None:
    """(B, L) bool, this forward's tokens that are not padding; None if there is no padding.

    Only a mask that the host can read may turn out to hide nothing: on an accelerator every mask moves tokens, since a
    look at it would stop the queue once a forward.
    """
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
    return real


def _real_so_far(
    attention_mask: torch.Tensor | None,
    real: torch.Tensor | None,
    before: torch.Tensor | None,
    past: int | torch.Tensor,
    batch: int,
    length: int,
) -> torch.Tensor | None:
    """(B, past + L) the columns that are not padding: of the mask, or the mask after what earlier ones said."""
    if attention_mask is not None and attention_mask.shape[1] > length:
        return attention_mask != 0
    if before is None and real is None:
        return None
    device = (before if real is None else real).device
    if before is None:
        before = torch.ones(batch, int(past), dtype=torch.bool, device=device)
    if real is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=device)
    return torch.cat([before, real], 1)


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


# ---- models/block.py ------------------------------------------------------------------------------------------------
# What all layers with a recurrent state share: unpad, mix, update the cache or prepare its rollback, repad.

class RecurrentMixin:
    """A layer whose states live in `past_key_values.layers[layer_idx]`; it only says how to `mix`."""

    layer_idx: int

    def mix(self, *inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, States]:
        """Mix rows (B, L, ...) whose real tokens come first; what is in `options` but not listed is the layer's own.

        Args:
            past: the states before the first token, empty before the first forward.
            seq_idx: (B, L) int, documents of packed rows; or None.
            lengths: (B,) int, real tokens at the front of each row; or None.
            return_final_state: also return the states.
            capacity: the tokens that a static cache has room for, for layers that keep all keys; or None.

        Returns:
            (B, L, ...) and the states after the last token, empty if they were not asked for.
        """
        raise NotImplementedError

    def step(
        self, *inputs: torch.Tensor, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """`mix` of rows (B, 1, ...) of one token after earlier ones, without gradients.

        It may overwrite the tensors of `past`: nobody asks for them again. A layer overrides it where one token is
        cheaper on its own.
        """
        rest = {"seq_idx": None, "lengths": None, "return_final_state": True}
        return self.mix(*inputs, past=past, capacity=capacity, **rest, **options)

    def states_after(self, *inputs: torch.Tensor, **options: Any) -> States:
        """The states that `mix` returns, for rollback; a layer overrides it where they are cheaper to compute
        alone."""
        return self.mix(*inputs, **options)[1]

    def mix_with_cache(
        self,
        *inputs: torch.Tensor,
        rows: PackedRows | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """`mix` of (B, L, ...) in columns as given, from the cache's states to the cache's states."""
        rows = PackedRows(inputs[0].shape[1]) if rows is None else rows
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        options["capacity"] = getattr(cache, "max_cache_len", None)
        states = {} if cache is None else cache.states
        if states and rows.is_step and not torch.is_grad_enabled() and not is_transforming():
            return self._step_with_cache(cache, rows, *inputs, **options)
        options["return_final_state"] = cache is not None
        inputs = tuple(rows.unpad(x) for x in inputs)

        def arguments(part: PackedRows) -> dict[str, Any]:
            documents = {"seq_idx": part.unpadded_seq_idx, "lengths": part.lengths}
            return {"past": part.continued(states), **documents, **options}

        y, states_after = self.mix(*inputs, **arguments(rows))
        if cache is not None:

            def recompute(first: PackedRows) -> States:
                return self.states_after(*(x[:, : first.length] for x in inputs), **arguments(first))

            cache.update_states(rows, states_after, recompute)
        return rows.repad(y)

    def _step_with_cache(self, cache: Any, rows: PackedRows, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        """`mix_with_cache` of one token after earlier ones, where no gradient is wanted."""
        past = rows.continued(cache.states)
        if cache.may_overwrite():
            y, states = self.step(*inputs, past=past, **options)
            cache.step_states(rows, states)
        else:
            past = {name: state.clone() for name, state in past.items()}
            y, states = self.step(*inputs, past=past, **options)
            cache.update_states(rows, states, _of_no_token)
        return y


def _of_no_token(first: PackedRows) -> States:
    raise AssertionError("one token is undone by going back to the states before it")


# ---- models/cache.py ------------------------------------------------------------------------------------------------
# The cache layer that transformers lacks: named states of any shape, a token count, and exact rollback.
#
# transformers' own `LinearAttentionLayer` does not serve: it has no length (`get_seq_length`), and once it holds a
# recurrent state no `crop`, which assisted generation and prompt lookup need.
#
# `DynamicCache(config=config)` and `StaticCache(config=config, ...)` build it for every layer whose `config.layer_types`
# entry is one of `STATE_LAYER_TYPES`, so `generate()`, beam search, prompt reuse and continuation work as for any other
# model.

STATE_LAYER_TYPES = (STATE_LAYER_TYPE, WINDOW_LAYER_TYPE)

Recompute = Callable[[PackedRows], States]


class _Forward(NamedTuple):
    """What it takes to undo one forward, wholly or in part."""

    rows: PackedRows
    previous: States
    previous_notes: States
    recompute: Recompute
    with_gradient: bool


class RecurrentStateLayer(CacheLayerMixin):
    """The states of one layer between two forwards: `states[name]`, each with the batch in front.

    Unlike keys and values, a state of fixed size forgets how it came about. To go back (`crop`, as assisted generation
    and prompt lookup do) the layer keeps, once `activate_past_recording()` was called, the states before each forward
    and a function that recomputes those after the first tokens of that forward.

    While no past is recorded, a forward of one token without gradients may overwrite the states or move along a buffer
    that holds them: who wants to come back to them takes a copy (`copy.deepcopy` of the cache).

    `notes` says which document each row is in (see `hf_hybrid_ssm.models.packing`); it is empty until rows are packed.
    """

    _layer_type = STATE_LAYER_TYPE
    holds_states = True
    is_sliding = True  # it does not grow: masks are to be sized by a layer that does
    supports_early_init = False
    is_croppable = True  # type: ignore[assignment]

    def __init__(self, **kwargs):
        super().__init__()
        self.states: States = {}
        self.notes: States = {}
        self.seen_tokens: int | torch.Tensor = 0
        self.record_past = False
        self.history: list[_Forward] = []
        self._made_without_gradient = False
        self.device: torch.device | None = None
        self.model_type: str | None = None

    def update_states(self, rows: PackedRows, states: States, recompute: Recompute) -> None:
        """Replace the states by those after more tokens.

        Args:
            rows: of the forward.
            states: name → tensor (B, ...). Every name of the layer is given at every call.
            recompute: `recompute(rows.first(n))` returns the states after the first n < L tokens of this forward;
                called only by `crop`, and kept only while the past is recorded.
        """
        if self.record_past:
            self.history.append(_Forward(rows, self.states, self.notes, recompute, torch.is_grad_enabled()))
        self.states = {name: _clone_if_view(state) for name, state in states.items()}
        self.notes = rows.notes
        self.seen_tokens += rows.length
        self.is_initialized = True
        self.device = next(iter(states.values())).device
        self._made_without_gradient = not torch.is_grad_enabled()

    def step_states(self, rows: PackedRows, states: States) -> None:
        """The states after one more token, which may be the present ones, overwritten (see `may_overwrite`)."""
        self.states, self.notes = states, rows.notes
        self.seen_tokens += 1

    def may_overwrite(self) -> bool:
        """Whether the states are this layer's alone, so that a step may compute the next ones in their place.

        They are not where the past is recorded or a graph of autograd may hold them, nor where torch forbids it
        (tensors made in inference mode, outside of it).
        """
        if self.record_past or not self._made_without_gradient:
            return False
        if torch.compiler.is_compiling():
            return self.is_compileable
        inference = torch.is_inference_mode_enabled()
        return inference or not any(state.is_inference() for state in self.states.values())

    @property
    def batch_size(self) -> int:
        if not self.states:
            raise AttributeError("the layer holds no states yet")
        return next(iter(self.states.values())).shape[0]

    def activate_past_recording(self) -> None:
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, then drop the recorded past (it must lie within it)."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be negative: the number of tokens to remove.")
        if not self.record_past:
            raise RuntimeError(
                "crop needs the recorded past: call `activate_past_recording()` on the cache before the forwards that "
                "may have to be undone."
            )
        recorded = sum(forward.rows.length for forward in self.history)
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} goes {-tokens_to_remove - recorded} tokens beyond the recorded "
                "past, which starts at the last `crop`."
            )
        remaining = -tokens_to_remove
        while remaining > 0:
            forward = self.history.pop()
            length = forward.rows.length
            kept = max(length - remaining, 0)
            self.states, self.notes = forward.previous, forward.previous_notes
            if kept:
                first = forward.rows.first(kept)
                with torch.set_grad_enabled(forward.with_gradient):
                    self.states, self.notes = forward.recompute(first), first.notes
            self.seen_tokens -= length - kept
            remaining -= length - kept
        self.history.clear()

    def reset(self) -> None:
        self.states, self.notes = {}, {}
        self.seen_tokens = 0
        self.history.clear()
        self.is_initialized = False

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Detach all states; rows (B,) bool get the state before the first token, which is zero in every family."""
        self._apply(lambda state: with_zero_rows(state.detach(), rows))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._apply(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self._apply(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._apply(lambda state: state.to(self.device, non_blocking=True))

    def get_seq_length(self) -> int:
        return self.seen_tokens  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *args, **kwargs) -> None:
        raise TypeError("a RecurrentStateLayer holds no keys and values; its mixer calls `update_states`.")

    update = lazy_initialization  # type: ignore[assignment]

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.states = {name: function(state) for name, state in self.states.items()}
        self.notes = {name: function(note) for name, note in self.notes.items()}
        self.history.clear()


class WindowLayer(RecurrentStateLayer):
    """The same under the other name."""

    _layer_type = WINDOW_LAYER_TYPE


class StaticRecurrentStateLayer(RecurrentStateLayer):
    """`RecurrentStateLayer` for compiled decoding: the states keep their addresses and the token count is a tensor."""

    _layer_type = None
    is_compileable = True
    is_croppable = False  # type: ignore[assignment]

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len

    def update_states(self, rows: PackedRows, states: States, recompute: Recompute) -> None:
        if not self.is_initialized:
            self._allocate(states)
        self._made_without_gradient = True  # they are copies
        self.step_states(rows, states)

    def step_states(self, rows: PackedRows, states: States) -> None:
        self.notes = rows.notes
        for name, state in states.items():
            if state is not self.states[name]:
                self.states[name].copy_(state)
        self.seen_tokens.add_(rows.length)  # type: ignore[union-attr]

    def _allocate(self, states: States) -> None:
        self.device = next(iter(states.values())).device
        self.states = {
            name: torch.zeros_like(state, requires_grad=False, memory_format=torch.contiguous_format)
            for name, state in states.items()
        }
        self.seen_tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*self.states.values(), self.seen_tokens):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def crop(self, tokens_to_remove: int) -> None:
        raise RuntimeError(
            "a static cache cannot go back: its states are overwritten in place; use "
            "`DynamicCache(config=model.config)`."
        )

    def get_max_length(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        self.notes = {}
        if self.is_initialized:  # zeros are the state before the first token in every family
            for tensor in (*self.states.values(), self.seen_tokens):
                tensor.zero_()

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.notes = {name: function(note) for name, note in self.notes.items()}
        for name, state in self.states.items():
            mapped = function(state)
            if mapped.shape == state.shape and mapped.device == state.device:
                state.copy_(mapped)
            else:
                self.states[name] = mapped


STATIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(STATE_LAYER_TYPES, StaticRecurrentStateLayer))


def is_recurrent_state_layer(layer: object) -> TypeGuard[RecurrentStateLayer]:
    """By a mark, not by its class: transformers makes the class registered last, and a process may hold several
    copies of this module (a folder's own code beside the package's, or two folders').
    """
    return getattr(layer, "holds_states", False)


def carry_segment(past_key_values: Cache, begins: torch.Tensor) -> None:
    """Make a cache, in place, the one that the next segment of every row starts from.

    No gradient goes back through it, and rows whose next segment begins a document start from zero.

    Args:
        past_key_values: what a forward with `use_cache=True` returned.
        begins: (B,) bool.

    Raises:
        ValueError: a layer keeps keys and values of all tokens (full attention), which cannot reset a single row; or
            `begins` has another shape or dtype.
    """
    for index, layer in enumerate(past_key_values.layers):
        if not is_recurrent_state_layer(layer):
            raise ValueError(
                f"layer {index} of past_key_values is a {type(layer).__name__}; only layers with a state of fixed "
                "size can carry it from segment to segment."
            )
        if begins.dtype != torch.bool or begins.shape != (layer.batch_size,):
            raise ValueError(
                f"begins must be bool of shape (batch,) = ({layer.batch_size},), got {begins.dtype} of shape "
                f"{tuple(begins.shape)}."
            )
        layer.reset_rows(begins)


def _clone_if_view(state: torch.Tensor) -> torch.Tensor:
    """A small view must not keep the activations of a whole prompt alive."""
    if not torch.compiler.is_compiling() and state.untyped_storage().nbytes() > state.numel() * state.element_size():
        return state.clone()
    return state


def tokens_and_notes(past_key_values: Cache | None) -> tuple[int | torch.Tensor, States]:
    """The tokens that a cache holds and its notes, by the first layer that has any: all hold the same.

    That is not always the first one: with pipeline parallelism the earlier layers are on other devices. A static
    cache's count is a tensor where reading it would cost (on an accelerator, while compiling).
    """
    layers = [layer for layer in getattr(past_key_values, "layers", ()) if layer.is_initialized]
    seen = layers[0].get_seq_length() if layers else 0
    if isinstance(seen, torch.Tensor) and seen.is_cpu and not torch.compiler.is_compiling():
        seen = int(seen)
    return seen, next((layer.notes for layer in layers if is_recurrent_state_layer(layer)), {})


def prepare_cache(past_key_values: Cache | None, config: PreTrainedConfig, batch_size: int) -> Cache:
    """The cache to use in this forward: a new one, or the given one if it fits the model and the batch.

    A `DynamicCache()` that was made without a config gets the layers of `config` while it is still empty; an empty
    layer becomes this family's.

    Raises:
        TypeError: `past_key_values` is not a `Cache`.
        ValueError: it was made for or filled by another model, or holds another batch size.
    """
    if past_key_values is None:
        past_key_values = DynamicCache(config=config)
    if not isinstance(past_key_values, Cache) or isinstance(past_key_values, EncoderDecoderCache):
        raise TypeError(
            f"past_key_values must be a transformers Cache of one stack, got {type(past_key_values).__name__}; make "
            "one with `DynamicCache(config=model.config)`."
        )
    if not past_key_values.layers and isinstance(past_key_values, DynamicCache):
        past_key_values.layers = DynamicCache(config=config).layers
        past_key_values.layer_class_to_replicate = None
    layers = past_key_values.layers
    wanted = [layer_type in STATE_LAYER_TYPES for layer_type in config.layer_types]
    if [is_recurrent_state_layer(layer) for layer in layers] != wanted:
        raise ValueError(
            f"past_key_values has layers {[type(layer).__name__ for layer in layers]}, which are not those of this "
            f"model ({len(wanted)} layers, layer_types={config.layer_types}); make it with "
            "`DynamicCache(config=model.config)`."
        )
    for index, layer in enumerate(layers):
        _check_content(layer, index, config.model_type, batch_size)
    return past_key_values


def _check_content(layer: CacheLayerMixin, index: int, model_type: str, batch_size: int) -> None:
    if is_recurrent_state_layer(layer):
        held = layer.batch_size if layer.states else None
    else:
        keys = getattr(layer, "keys", None)
        is_filled = isinstance(keys, torch.Tensor) and keys.dim() == 4 and not torch.compiler.is_compiling()
        held = keys.shape[0] if is_filled else None
    if held not in (None, batch_size):
        raise ValueError(
            f"past_key_values holds a batch of {held} (layer {index}), but the input has a batch of {batch_size}."
        )
    if not is_recurrent_state_layer(layer) or torch.compiler.is_compiling():
        return
    if layer.states and layer.model_type not in (None, model_type):
        raise ValueError(
            f"past_key_values was filled by a model of the family {layer.model_type!r} (layer {index}), this model "
            f"is of the family {model_type!r}; make a new one with `DynamicCache(config=model.config)`."
        )
    layer.model_type = model_type


def check_cache_without_states(past_key_values: Cache | None, rows: PackedRows) -> None:
    """In a model with only full attention there is no place for notes: pieces that would need them are refused.

    Raises:
        ValueError: the cache holds documents or padding, and it is not known where.
    """
    if past_key_values is None or any(map(is_recurrent_state_layer, past_key_values.layers)):
        return
    layer = past_key_values.layers[0]
    unkept = getattr(layer, "unkept", {})
    if not isinstance(rows.past, int) or rows.past > 0:
        _refuse(unkept.get("documents"), "several documents of packed rows", "read packed rows at once")
        if not rows.covers_past:
            _refuse(unkept.get("padding"), "padding", "give an attention_mask of all tokens so far")
    layer.unkept = {}
    if rows.starts is not None:
        layer.unkept["documents"] = (rows.starts[:, -1] > 0).any()
    if rows.real_so_far is not None:
        layer.unkept["padding"] = ~rows.real_so_far.all()


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


# ---- models/base.py -------------------------------------------------------------------------------------------------
# What the models of all families share: `HybridPreTrainedModel`, and the forward of their base models.

LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
NARROW = (torch.bfloat16, torch.float16)


class HybridPreTrainedModel(PreTrainedModel):
    """Base of every family's `PreTrainedModel`: what it supports, float32 parameters, parallel plans, saved code."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _tp_plan: dict[str, str] | None
    _fsdp_plan: dict[str, str] | None

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        self._check_config(config)
        super().__init__(config, *args, **kwargs)

    def _check_config(self, config: Any) -> None:
        """A model is built from its own family's configuration, or one derived from it, whose fields fit each other.

        By the name of the family: a folder's own code has copies of the classes.

        Raises:
            TypeError: it is not a configuration of that family.
            ValueError: its fields, changed since it was made, do not fit each other.
        """
        wanted = type(self).config_class
        if wanted.model_type not in {getattr(kind, "model_type", None) for kind in type(config).__mro__}:
            raise TypeError(f"{type(self).__name__} needs a {wanted.__name__}, got {type(config).__name__}.")
        config.validate_layer_type()
        config.validate_architecture()

    def post_init(self) -> None:
        self._keep_in_fp32_modules_strict = {
            name
            for module in self.modules()
            if isinstance(module, Float32ParametersMixin)
            for name in module.float32_parameters
            if name in module._parameters
        }
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Mixers start as their papers say, known by their method: a family without mixers imports none."""
        if hasattr(module, "initial_values"):
            for name, value in module.initial_values().items():
                init.copy_(module.get_parameter(name), value)
            module.clear_kernel_cache()
        else:
            super()._init_weights(module)

    # -- output_attentions --------------------------------------------------------------------------------------

    def _why_no_attentions(self) -> str | None:
        """Why there are no attention weights to return; None where there are."""
        return "attention is computed in blocks, which never form a matrix of weights"

    def _refuse_attentions(self, output_attentions: bool | None) -> None:
        """Refuse `output_attentions=True` where there are no weights to return.

        Args:
            output_attentions: the argument of the forward; None leaves it to `config.output_attentions`.

        Raises:
            ValueError: weights were asked for that do not exist.
        """
        asked = self.config.output_attentions if output_attentions is None else output_attentions
        if asked and (reason := self._why_no_attentions()) is not None:
            raise ValueError(
                f"output_attentions=True cannot be answered by a {self.config.model_type!r} model: {reason}."
            )

    # -- parallel plans -----------------------------------------------------------------------------------------

    def init_parallel_plans(self) -> None:
        """A configuration's plans cover every layer that its family can have; these become those of this model.

        `tp_plan` and `fsdp_plan` lose the rules that match nothing here. `fsdp_plan` gains rules where the weights are
        narrower than float32: FSDP2 shards units of one dtype, so what shares a module with parameters that stay
        float32 becomes units of its own. (transformers makes a unit of each module that holds such parameters.)
        """
        super().init_parallel_plans()
        modules = [(LAYER_NUMBER.sub("*", name), module) for name, module in self.named_modules()]
        linear = {name for name, module in modules if isinstance(module, nn.Linear | nn.Embedding)}
        self._tp_plan = _matching(self._tp_plan, linear)
        self._fsdp_plan = _matching(self._fsdp_plan, {name for name, _ in modules})
        if self.dtype in NARROW:
            for name, module in modules:
                self._fsdp_plan |= dict.fromkeys(_beside_float32(name, module), "free_full_weight")

    @property
    def supports_pp_plan(self) -> bool:
        """transformers cuts `base_model.layers`; encoders have theirs elsewhere."""
        return super().supports_pp_plan and hasattr(self.base_model, "layers")

    # -- loading ------------------------------------------------------------------------------------------------

    # refuses a folder whose weight files are incomplete: set by the package, and None in an exported copy of this file
    check_weight_files: ClassVar[Callable[[Any], None] | None] = None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a folder with a missing or truncated weight file is refused by the file's name, before
        any is read.

        Raises:
            ValueError: names the file.
        """
        reads_others = {"subfolder", "variant", "gguf_file", "state_dict"} & kwargs.keys()
        if cls.check_weight_files is not None and not reads_others and kwargs.get("use_safetensors") is not False:
            cls.check_weight_files(pretrained_model_name_or_path)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    # -- saving with code ---------------------------------------------------------------------------------------

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, export_code: bool | None = None, **kwargs: Any
    ) -> None:
        """As in transformers; `export_code=True` adds the code that `trust_remote_code=True` loads without this
        package, `False` leaves it out. By default a model keeps what it came with: whoever could load it can load what
        becomes of it.
        """
        self._set_code(export_code, save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, repo_id: str, *args: Any, export_code: bool | None = None, **kwargs: Any) -> str:
        """As in transformers; for `export_code` see `save_pretrained`."""
        self._set_code(export_code)
        return super().push_to_hub(repo_id, *args, **kwargs)

    def _set_code(self, export_code: bool | None, folder: str | os.PathLike | None = None) -> None:
        exporter = None if export_code is None else self.config.code_exporter
        if exporter is not None and export_code:
            exporter.check_exportable(self.config.model_type, self, folder)
            self.config.auto_map = exporter.auto_map_of(self.config.model_type)
        elif exporter is not None and hasattr(self.config, "auto_map"):
            del self.config.auto_map


def _matching(plan: dict[str, str] | None, names: set[str]) -> dict[str, str]:
    return {rule: style for rule, style in (plan or {}).items() if rule in names}


def _beside_float32(name: str, module: nn.Module) -> list[str]:
    """The children with parameters of a module that keeps some of its own parameters in float32."""
    if not isinstance(module, Float32ParametersMixin):
        return []
    if all(module._parameters.get(kept) is None for kept in module.float32_parameters):
        return []
    return [f"{name}.{child}" for child, part in module.named_children() if any(True for _ in part.parameters())]


class WithoutContinuousBatching:
    """Refuses `generate_batch`, whose paged cache holds keys and values of single tokens. `transformers serve` asks
    for `init_continuous_batching`, and generates request by request where it is missing.
    """

    def continuous_batching_context_manager(self, *args, **kwargs):
        raise ValueError(
            f"{type(self).__name__} has no continuous batching (generate_batch): its paged cache holds the keys and "
            "values of single tokens, and this model's layers keep states. Call generate with a left-padded batch and "
            "its attention_mask, which gives the same text as each prompt alone."
        )

    def generate_batch(self, *args, **kwargs):
        return self.continuous_batching_context_manager()

    @property
    def init_continuous_batching(self):
        raise AttributeError


class HybridModelMixin:
    """The forward of a base model with `embed_tokens`, `layers` and `norm` (or None); placed before the family's
    `PreTrainedModel`.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module | None
    is_bidirectional = False  # its tokens see the future: there is nothing to continue
    has_columns = False  # layers read the positions of tokens or attend to all columns so far

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        continues_documents: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        attention_mask (`torch.Tensor` of shape `(batch_size, tokens so far)`, *optional*):
            1 for text, 0 for padding, on either side; of this forward's tokens or of all tokens so far.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        cu_seq_lens_q (`torch.IntTensor` of shape `(documents + 1,)`, *optional*):
            Where the documents of a single packed row begin and end, instead of `seq_idx`.
        continues_documents (`bool`, *optional*, defaults to `False`):
            The first tokens go on with the documents in `past_key_values`, as they do in each step of `generate`. A
            single token that does is not padding.
        """
        self._refuse_attentions(kwargs.get("output_attentions"))
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if self.is_bidirectional:
            if past_key_values is not None:
                raise ValueError(
                    f"past_key_values cannot be used with a bidirectional {type(self).__name__}: its tokens see the "
                    "future."
                )
            use_cache = False
        if use_cache or past_key_values is not None:
            past_key_values = prepare_cache(past_key_values, self.config, inputs_embeds.shape[0])
        masks = attention_mask if isinstance(attention_mask, dict) else None  # made ahead of compiled decoding
        rows = resolve_packing(
            inputs_embeds.shape[:2],
            tokens_and_notes(past_key_values),
            attention_mask=attention_mask if masks is None else masks[STATE_LAYER_TYPE],
            position_ids=position_ids,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
            continues_documents=continues_documents,
            keeps_starts=self.has_columns,
            # prepared masks contain the padding, and a note that grows would recompile every compiled step
            keeps_padding=self.has_columns and (masks is None or position_ids is None),
        )
        check_cache_without_states(past_key_values, rows)
        options = {"position_ids": position_ids, "masks": masks, **kwargs}
        hidden_states = self._run_layers(inputs_embeds, rows, past_key_values, **options)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states if self.norm is None else self.norm(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )

    def _run_layers(
        self, hidden_states: torch.Tensor, rows: PackedRows, past_key_values: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        """(B, L, d) embeddings → (B, L, d) before the last norm; `kwargs` are for layers with positions or masks."""
        return self._through_layers(hidden_states, rows, past_key_values=past_key_values)

    def _through_layers(
        self, hidden_states: torch.Tensor, *inputs: Any, past_key_values: Cache | None, **options: Any
    ) -> torch.Tensor:
        """The layers one after the other, each with the same inputs."""
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer while generation exits early
            # by name: gradient checkpointing takes the cache out, or a recompute would store the states twice
            hidden_states = layer(hidden_states, *inputs, past_key_values=past_key_values, **options)
        return hidden_states


# ---- models/heads.py ------------------------------------------------------------------------------------------------
# What the heads of all families share.

class LMHead:
    """A prediction of tokens over the family's base model; placed before the pretrained class, like all heads here."""

    config: Any
    training: bool
    base_model_class: type[nn.Module]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.base_model_class(config)
        self.lm_head = self._build_lm_head(config)
        self.post_init()

    def _build_lm_head(self, config: PreTrainedConfig) -> nn.Module:
        return nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def _pre_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What a family does to (B, L, D) between the last norm and the head; nothing here."""
        return hidden_states

    def _uses_fused_loss(self) -> bool:
        """Not with a wrapped head (LoRA, quantization), which has more than a weight, nor with a shard of it (tensor
        parallelism): such a head is called, as any module."""
        is_plain = type(self.lm_head) is nn.Linear and type(self.lm_head.weight) is nn.Parameter
        return self.training and self.config.use_linear_cross_entropy and is_plain

    def _predict(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(B, L, D) of the base model and labels (B, L) → logits and loss; a fused loss never holds all logits."""
        hidden_states = self._pre_head(hidden_states)
        if labels is not None and self._uses_fused_loss():
            return None, self._fused_loss(hidden_states, labels, **kwargs)
        logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
        if labels is None:
            return logits, None
        return logits, self.loss_function(
            logits=logits, labels=labels.contiguous(), vocab_size=self.config.vocab_size, **kwargs
        )

    def _targets(self, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """(B, L) labels → the token that belongs at each position."""
        return labels

    def _fused_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Of (B, L, D), the input of the head: the mean over the targets, or their sum divided by `num_items_in_batch`
        (targets over all accumulation steps), as transformers' losses.

        A head with a `loss` of its own (an adaptive softmax) computes the sum itself.
        """
        head = self.lm_head
        targets = self._targets(labels, ignore_index=ignore_index, **kwargs).to(hidden_states.device)
        if isinstance(head, nn.Linear):
            options = {"bias": head.bias, "ignore_index": ignore_index, "num_items": num_items_in_batch}
            options["reduction"] = "mean" if num_items_in_batch is None else "sum"
            return linear_cross_entropy(hidden_states, head.weight, targets, **options)
        count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return head.loss(hidden_states.flatten(0, 1), targets.flatten(), ignore_index) / count


class CausalLMHead(WithoutContinuousBatching, LMHead):
    """Next-token prediction."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Token ids to predict, equal to `input_ids` (they are shifted inside); -100 is ignored.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be 0 (all) or the number of last tokens.")
        if labels is not None:
            given = input_ids if inputs_embeds is None else inputs_embeds
            keeps_all = given is not None and isinstance(logits_to_keep, int) and logits_to_keep == 0
            check_labels(labels, self.config.vocab_size, given.shape[:2] if keeps_all else None)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            seq_idx=seq_idx,
            **kwargs,
        )
        logits, loss = self._predict(outputs.last_hidden_state, labels, logits_to_keep, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def prepare_inputs_for_generation(self, *args, is_first_iteration: bool | None = False, **kwargs) -> dict:
        """As in transformers; no step after the first begins a document, whose positions then need no look."""
        inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)  # type: ignore[misc]
        return inputs | {"continues_documents": not is_first_iteration}

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, **kwargs) -> dict:
        """Masks made ahead of compiled decoding; a generated token is never padding.

        transformers' `create_recurrent_attention_mask` does not serve: it drops the columns of earlier tokens, and so
        where their padding was, and ignores masks that it does not understand.
        """
        return {STATE_LAYER_TYPE: None if inputs_embeds.shape[1] == 1 else attention_mask}

    def _targets(
        self, labels: torch.Tensor, shift_labels: torch.Tensor | None = None, ignore_index: int = -100, **kwargs: Any
    ) -> torch.Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return shift_labels


class MaskedLMHead(LMHead):
    """Prediction of masked tokens over a base model whose tokens see both sides."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        seq_idx: torch.IntTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The token that belongs at each masked position; -100 elsewhere.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        """
        if labels is not None:
            given = input_ids if inputs_embeds is None else inputs_embeds
            check_labels(labels, self.config.vocab_size, None if given is None else given.shape[:2])
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            seq_idx=seq_idx,
            **kwargs,
        )
        logits, loss = self._predict(outputs.last_hidden_state, labels, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class SequenceClassificationHead:
    """A linear classifier over the last real token of the family's causal base model.

    The last real token is the last one the attention mask marks as real; without a mask, the last that is not
    `config.pad_token_id`. Either side may be padded. (transformers' generic head goes by `pad_token_id` alone.)
    """

    base_model_class: type[nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.base_model_class(config)
        self.score = nn.Linear(config.hidden_size, self._num_scores(config), bias=False)
        self.post_init()

    def _num_scores(self, config: PreTrainedConfig) -> int:
        return config.num_labels

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutputWithPast:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)`, *optional*):
            Class indices (or values, for regression with `num_labels == 1`).
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        last = last_real_token(input_ids, attention_mask, self.config.pad_token_id, hidden_states.shape[:2])
        rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        pooled_logits = self.score(hidden_states[rows, last.to(hidden_states.device)])
        loss = None
        if labels is not None:
            check_class_labels(labels, pooled_logits, self.config.problem_type)
            loss = self.loss_function(
                logits=pooled_logits, labels=labels, pooled_logits=pooled_logits, config=self.config
            )
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled_logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class MultipleChoiceHead:
    """Which of several texts is right: each gets one score; placed before a sequence classifier's head, which gives
    it."""

    def _num_scores(self, config: PreTrainedConfig) -> int:
        return 1

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        r"""
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            The texts to choose from; `attention_mask` and `inputs_embeds` have the choices in the same place.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            The number of the right one.
        """
        texts = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        for name, tensor in texts.items():
            if tensor is not None and tensor.dim() != (4 if name == "inputs_embeds" else 3):
                shape = "(batch, choices, length" + (", hidden_size)" if name == "inputs_embeds" else ")")
                raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}.")
        choices = next((tensor.shape[1] for tensor in texts.values() if tensor is not None), 1)
        rows = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in texts.items()}
        outputs = super().forward(**rows, **kwargs | {"return_dict": True})  # type: ignore[misc]
        logits = outputs.logits.view(-1, choices)
        loss = None
        if labels is not None:
            check_class_labels(labels, logits, "single_label_classification")
            loss = nn.functional.cross_entropy(logits.float(), labels.to(logits.device))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class TokenClassificationHead(GenericForTokenClassification):
    """transformers' head, one class per token, over the family's base model `base_model_class`.

    The generic head asks `AutoModel` for the base model, which code exported with a checkpoint cannot do.
    """

    base_model_class: Callable[[Any], nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super(GenericForTokenClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = self.base_model_class(config)
        rates = (getattr(config, name, None) for name in ("classifier_dropout", "final_dropout", "hidden_dropout"))
        self.dropout = nn.Dropout(next((rate for rate in rates if rate is not None), 0.1))  # as in transformers
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The class of each token; -100 is ignored.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and given is not None:
            check_token_classes(labels, given.shape[:2], self.config.num_labels)
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, labels, use_cache)
        return super().forward(*inputs, **kwargs)


class QuestionAnsweringHead(GenericForQuestionAnswering):
    """transformers' head, start and end of a span, over the family's base model `base_model_class`."""

    base_model_class: Callable[[Any], nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super(GenericForQuestionAnswering, self).__init__(config)
        self.model = self.base_model_class(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        r"""
        start_positions, end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            The first and the last token of the answer; rows whose answer lies beyond their end are ignored.
        """
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is not None:
            check_span(start_positions, end_positions, given.shape[0])
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        return super().forward(*inputs, start_positions, end_positions, **kwargs)


def last_real_token(
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    pad_token_id: int | None,
    shape: tuple[int, int],
) -> torch.Tensor:
    """Column of each row's last real token, (B,) int64.

    Raises:
        ValueError: a batch of several rows, and nothing that tells padding from text.
    """
    batch, length = shape
    if attention_mask is not None and attention_mask.dim() == 2:
        real = attention_mask[:, -length:] != 0
    elif input_ids is not None and pad_token_id is not None:
        real = input_ids != pad_token_id
    elif batch == 1 or input_ids is None:
        return torch.full((batch,), length - 1)
    else:
        raise ValueError(
            f"A batch of {batch} rows needs an attention_mask or config.pad_token_id to find each row's last token."
        )
    return (torch.arange(length, device=real.device) * real).argmax(1)
