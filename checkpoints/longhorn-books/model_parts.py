# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 65e992c2d81716f51a20fe52a72ad5daae5235a2a2e3fbc8b97614daf8ae16b0

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeGuard

import torch
from torch import nn
from transformers import (
    Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel, initialization as init,
)
from transformers.cache_utils import CacheLayerMixin, STATIC_LAYER_TYPE_MAPPING
from transformers.masking_utils import find_packed_sequence_indices
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

from .configuration_longhorn import STATE_LAYER_TYPE, WINDOW_LAYER_TYPE
from .dispatch import can_read_values, check_seq_idx, is_transforming
from .linear_cross_entropy import linear_cross_entropy
from .mixers import Float32ParametersMixin


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

States = dict[str, torch.Tensor]
Recompute = Callable[[int], States]


@dataclass
class _Forward:
    """What it takes to undo one forward, wholly or in part."""

    num_tokens: int
    previous: States
    recompute: Recompute
    previous_notes: States
    replay_notes: Recompute
    with_gradient: bool
    waiting_after: Callable[[int], torch.Tensor] | None

    def states_after(self, num_tokens: int) -> States:
        """The states after the first tokens; a row that had none of them is as it was before it was to start anew."""
        if num_tokens == 0:
            return self.previous
        with torch.set_grad_enabled(self.with_gradient):
            states = self.recompute(num_tokens)
            if self.waiting_after is None:
                return states
            rows = self.waiting_after(num_tokens)
            return {name: _taken_rows(rows, self.previous[name], state) for name, state in states.items()}


class RecurrentStateLayer(CacheLayerMixin):
    """The states of one layer between two forwards: `states[name]`, each with the batch in front.

    Unlike keys and values, a state of fixed size forgets how it came about. To go back (`crop`, as assisted generation
    and prompt lookup do) the layer keeps, once `activate_past_recording()` was called, the states before each forward
    and a function that replays the first tokens of that forward.

    While no past is recorded, a forward of one token without gradients may overwrite the states or move along a buffer
    that holds them: who wants to come back to them takes a copy (`copy.deepcopy` of the cache).

    `notes` says which document each row is in (see `hf_hybrid_ssm.models.packing`); it is empty until rows are packed.
    """

    _layer_type = STATE_LAYER_TYPE
    holds_states = True
    is_sliding = True  # it does not grow: masks are to be sized by a layer that does
    supports_early_init = False

    def __init__(self, **kwargs):
        super().__init__()
        self.states: States = {}
        self.seen_tokens: int | torch.Tensor = 0
        self.record_past = False
        self.notes: States = {}
        self.history: list[_Forward] = []
        self._made_without_gradient = False
        self._before: States | None = None
        self._next_notes: Recompute | None = None
        self._waiting_after: Callable[[int], torch.Tensor] | None = None
        self.device: torch.device | None = None
        self.model_type: str | None = None

    def update_states(self, num_tokens: int, states: States, recompute: Recompute) -> None:
        """Replace the states by those after `num_tokens` more tokens.

        Args:
            num_tokens: tokens of this forward, padding included.
            states: name → tensor (B, ...). Every name of the layer is given at every call.
            recompute: `recompute(n)` returns the states after the first n < num_tokens tokens of this forward; called
                only by `crop`, and kept only while the past is recorded.
        """
        notes, next_notes = self.notes, self._take_notes(num_tokens)
        if self.record_past:
            previous = self.states if self._before is None else self._before
            notes_of = (notes, next_notes, torch.is_grad_enabled(), self._waiting_after)
            self.history.append(_Forward(num_tokens, previous, recompute, *notes_of))
        self._before = self._waiting_after = None
        self.states = {name: _clone_if_view(state) for name, state in states.items()}
        self.seen_tokens += num_tokens
        self.is_initialized = True
        self.device = next(iter(states.values())).device
        self._made_without_gradient = not torch.is_grad_enabled()

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

    def step_states(self, states: States) -> None:
        """The states after one more token, which may be the present ones, overwritten (see `may_overwrite`)."""
        self._take_notes(1)
        self._before = self._waiting_after = None
        self.states = states
        self.seen_tokens += 1

    def open(
        self,
        begins: torch.Tensor | None,
        next_notes: Recompute | None,
        waiting_after: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        """Before a forward: rows whose first token begins a document start from zeros.

        Args:
            begins: (B,) bool, or None if no row does.
            next_notes: `next_notes(n)` are the notes after the first n tokens of the forward; None leaves them alone.
            waiting_after: `waiting_after(n)` are the rows (B,) bool of `begins` whose first n columns are padding.
        """
        self._next_notes = next_notes
        self._before = None
        self._waiting_after = waiting_after
        if begins is not None and self.is_initialized:
            self._before = self.states
            self._restart(begins)

    def _restart(self, rows: torch.Tensor) -> None:
        self.states = {name: _cleared(state, rows) for name, state in self.states.items()}

    def _take_notes(self, num_tokens: int) -> Recompute:
        """Notes move on by `num_tokens`; returns what replays them."""
        notes = self.notes
        if self._next_notes is None:
            return lambda num_tokens: notes
        next_notes, self._next_notes = self._next_notes, None
        self.notes = next_notes(num_tokens)
        return next_notes

    @property
    def batch_size(self) -> int:
        if not self.states:
            raise AttributeError("the layer holds no states yet")
        return next(iter(self.states.values())).shape[0]

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return True

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
        recorded = sum(forward.num_tokens for forward in self.history)
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} goes {-tokens_to_remove - recorded} tokens beyond the recorded "
                "past, which starts at the last `crop`."
            )
        remaining = -tokens_to_remove
        while remaining > 0:
            forward = self.history.pop()
            kept = max(forward.num_tokens - remaining, 0)
            self.states = forward.states_after(kept)
            self.notes = forward.replay_notes(kept) if kept else forward.previous_notes
            self.seen_tokens -= forward.num_tokens - kept
            remaining -= forward.num_tokens - kept
        self.history.clear()

    def reset(self) -> None:
        self.states, self.notes = {}, {}
        self.seen_tokens = 0
        self.history.clear()
        self.is_initialized = False

    def reset_rows(self, rows: torch.Tensor) -> None:
        """Detach all states; rows (B,) bool get the state before the first token, which is zero in every family."""

        self._apply(lambda state: _cleared(state.detach(), rows))

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

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise TypeError("a RecurrentStateLayer holds no keys and values; its mixer calls `update_states`.")

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError("a RecurrentStateLayer holds no keys and values; its mixer calls `update_states`.")

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

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len

    def update_states(self, num_tokens: int, states: States, recompute: Recompute) -> None:
        self._take_notes(num_tokens)
        if not self.is_initialized:
            self._allocate(states)
        self._made_without_gradient = True  # they are copies
        for name, state in states.items():
            self.states[name].copy_(state)
        self.seen_tokens.add_(num_tokens)  # type: ignore[union-attr]

    def step_states(self, states: States) -> None:
        self._take_notes(1)
        for name, state in states.items():
            if state is not self.states[name]:
                self.states[name].copy_(state)
        self.seen_tokens.add_(1)  # type: ignore[union-attr]

    def _restart(self, rows: torch.Tensor) -> None:
        for state in self.states.values():
            state.copy_(_cleared(state, rows))

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

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        return False

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


def _taken_rows(rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`after` (B, ...) with `rows` (B,) bool from `before`; states (B, G, T, e) that grow with T end at the right."""
    if before.shape != after.shape:
        before = torch.nn.functional.pad(before, (0, 0, after.shape[2] - before.shape[2], 0))
    return torch.where(rows.to(after.device).view(-1, *[1] * (after.dim() - 1)), before, after)


def _cleared(state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`state` (B, ...) with zeros in `rows` (B,) bool."""
    return torch.where(rows.to(state.device).view(-1, *[1] * (state.dim() - 1)), torch.zeros_like(state), state)


def _clone_if_view(state: torch.Tensor) -> torch.Tensor:
    """A small view must not keep the activations of a whole prompt alive."""
    if not torch.compiler.is_compiling() and state.untyped_storage().nbytes() > state.numel() * state.element_size():
        return state.clone()
    return state


def tokens_so_far(past_key_values: Cache | None) -> int | torch.Tensor:
    """Tokens that a cache holds, by the first layer that has any.

    That is not always the first one: with pipeline parallelism the earlier layers are on other devices. A static
    cache's count is a tensor where reading it would cost (on an accelerator, while compiling).
    """
    for layer in () if past_key_values is None else past_key_values.layers:
        if layer.is_initialized:
            seen = layer.get_seq_length()
            is_readable = not torch.compiler.is_compiling() and isinstance(seen, torch.Tensor) and seen.is_cpu
            return int(seen) if is_readable else seen
    return 0


def prepare_cache(past_key_values: Cache | None, config: PreTrainedConfig, batch_size: int) -> Cache:
    """The cache to use in this forward: a new one, or the given one if it fits the model and the batch.

    A `DynamicCache()` that was made without a config gets the layers of `config` while it is still empty.

    Raises:
        TypeError: `past_key_values` is not a `Cache`.
        ValueError: it was made for another model, or holds another batch size.
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
    model_type = config.model_type
    for index, layer in enumerate(layers):
        if is_recurrent_state_layer(layer) and layer.states and layer.batch_size != batch_size:
            raise ValueError(
                f"past_key_values holds a batch of {layer.batch_size} (layer {index}), but the input has a batch of "
                f"{batch_size}."
            )
        _check_owner(layer, index, model_type, batch_size)
    return past_key_values


def _check_owner(layer: CacheLayerMixin, index: int, model_type: str, batch_size: int) -> None:
    """A filled layer must be this family's, and hold this batch; an empty one becomes this family's."""
    if torch.compiler.is_compiling():
        return
    if not is_recurrent_state_layer(layer):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[0] != batch_size:
            raise ValueError(
                f"past_key_values holds a batch of {keys.shape[0]} (layer {index}), but the input has a batch of "
                f"{batch_size}."
            )
        return
    if layer.states and layer.model_type not in (None, model_type):
        raise ValueError(
            f"past_key_values was filled by a model of the family {layer.model_type!r} (layer {index}), this model "
            f"is of the family {model_type!r}; make a new one with `DynamicCache(config=model.config)`."
        )
    layer.model_type = model_type


# ---- models/unpadding.py --------------------------------------------------------------------------------------------
# Unpadding: a row's real tokens are moved to its front, so that every layer sees the row as if it were alone.
#
# One code path then serves left, right and scattered padding, in the first forward and in every later one: windows,
# blocks and decays count real tokens only, and a state passes padding unchanged.

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


# ---- models/inputs.py -----------------------------------------------------------------------------------------------
# Checks of every model's inputs, before the first layer.

def check_token_ids(name: str, ids: torch.Tensor, vocab_size: int, *, ignore_index: int | None = None) -> None:
    """Token ids must be integers within the vocabulary (checked on CPU only, where reading values is cheap).

    Raises:
        TypeError: `ids` is not an integer tensor.
        ValueError: an id is outside of 0 … vocab_size - 1 (and not `ignore_index`).
    """
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of token ids, got {type(ids).__name__}.")
    if ids.dtype not in (torch.int32, torch.int64):
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
    if shape is not None and labels.shape != shape:
        raise ValueError(
            f"labels must have the input's shape (batch, length) = {tuple(shape)}, got {tuple(labels.shape)}."
        )


def check_class_labels(labels: torch.Tensor, logits: torch.Tensor, problem_type: str | None) -> None:
    """The labels of a classifier with `logits` (B, C): class indices (B,), or values if it is not a single choice.

    Raises:
        TypeError: `labels` is not a tensor, or class indices are not integers.
        ValueError: wrong shape, or a class index outside of 0 … C - 1.
    """
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels must be a tensor, got {type(labels).__name__}.")
    batch, classes = logits.shape
    integers = labels.dtype in (torch.int32, torch.int64)
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
    if can_read_values(labels) and bool(((labels < 0) & (labels != -100) | (labels >= classes)).any()):
        raise ValueError(
            f"labels has classes from {int(labels.min())} to {int(labels.max())}, but num_labels={classes}: they must "
            f"lie in 0..{classes - 1}."
        )


def check_token_classes(labels: torch.Tensor, shape: tuple[int, int], classes: int) -> None:
    """A class 0 … C - 1 for each token of the input's `shape`, -100 to ignore it.

    Raises:
        TypeError: `labels` is not an integer tensor.
        ValueError: another shape, or a class that does not exist.
    """
    _check_integers("labels", labels)
    if labels.shape != shape:
        raise ValueError(
            f"labels must have the input's shape (batch, length) = {tuple(shape)}, got {tuple(labels.shape)}."
        )
    if can_read_values(labels) and bool(((labels < 0) & (labels != -100) | (labels >= classes)).any()):
        raise ValueError(
            f"labels has classes from {int(labels.min())} to {int(labels.max())}, but num_labels={classes}: they must "
            f"lie in 0..{classes - 1}, or be -100."
        )


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
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        have = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {have}.")


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


# ---- models/block.py ------------------------------------------------------------------------------------------------
# What all layers with a recurrent state share: unpad, mix, update the cache or prepare its rollback, repad.

class RecurrentMixin:
    """A layer whose states live in `past_key_values.layers[layer_idx]`; it only says how to `mix`."""

    layer_idx: int

    def mix(self, *rows: torch.Tensor, **options: Any) -> tuple[torch.Tensor, States]:
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
        self, *rows: torch.Tensor, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """`mix` of rows (B, 1, ...) of one token after earlier ones, without gradients.

        It may overwrite the tensors of `past`: nobody asks for them again. A layer overrides it where one token is
        cheaper on its own.
        """
        rest = {"seq_idx": None, "lengths": None, "return_final_state": True}
        return self.mix(*rows, past=past, capacity=capacity, **rest, **options)

    def states_after(self, *rows: torch.Tensor, **options: Any) -> States:
        """The states that `mix` returns, for rollback; a layer overrides it where they are cheaper to compute
        alone."""
        return self.mix(*rows, **options)[1]

    def mix_with_cache(
        self,
        *rows: torch.Tensor,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """`mix` of rows (B, L, ...) in columns as given, from the cache's states to the cache's states."""
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        is_step = unpadding is None and seq_idx is None and rows[0].shape[1] == 1
        if is_step and cache is not None and cache.states and not torch.is_grad_enabled() and not is_transforming():
            return self._step_with_cache(cache, *rows, **options)
        lengths = None
        if unpadding is not None:
            rows, lengths = tuple(unpadding.unpad(row) for row in rows), unpadding.lengths
            # padding now follows the last document: let it belong there
            seq_idx = None if seq_idx is None else unpadding.unpad(seq_idx).cummax(1).values
        options |= {
            "past": {} if cache is None else cache.states,
            "return_final_state": cache is not None,
            "capacity": getattr(cache, "max_cache_len", None),
        }
        y, states = self.mix(*rows, seq_idx=seq_idx, lengths=lengths, **options)
        if cache is not None:

            def recompute(num_tokens: int) -> States:
                return self.states_after(
                    *(row[:, :num_tokens] for row in rows),
                    seq_idx=None if seq_idx is None else seq_idx[:, :num_tokens],
                    lengths=None if unpadding is None else unpadding.lengths_of_first(num_tokens),
                    **options,
                )

            cache.update_states(rows[0].shape[1], states, recompute)
        return y if unpadding is None else unpadding.repad(y)

    def _step_with_cache(self, cache: Any, *rows: torch.Tensor, **options: Any) -> torch.Tensor:
        """`mix_with_cache` of one token after earlier ones, where no gradient is wanted."""
        options["capacity"] = getattr(cache, "max_cache_len", None)
        if cache.may_overwrite():
            y, states = self.step(*rows, past=cache.states, **options)
            cache.step_states(states)
        else:
            past = {name: state.clone() for name, state in cache.states.items()}
            y, states = self.step(*rows, past=past, **options)
            cache.update_states(1, states, _of_no_token)
        return y


def _of_no_token(num_tokens: int) -> States:
    raise AssertionError("one token is undone by going back to the states before it")


# ---- models/packing.py ----------------------------------------------------------------------------------------------
# Packed rows: the document of each token, in one forward and over the pieces that a cache has read.
#
# Within a piece, `seq_idx`, `cu_seq_lens_q` or positions that restart say where documents begin. Whether the first token
# of a piece continues the row's last document depends on its number, or on a position of 0. What later pieces must know
# is kept beside the states (`RecurrentStateLayer.notes`):
#
#     document  (B,) int64, 2 seq_idx + 1 of the row's last token; 0 where no seq_idx was given
#     start     (B,) int64, the column of all tokens so far where the row's last document begins
#     real      (B, T) bool, which columns so far are not padding

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


# ---- models/multiple_choice.py --------------------------------------------------------------------------------------
# Multiple choice, over the head of a sequence classifier.

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
        return self.training and self.config.use_linear_cross_entropy and is_plain_linear(self.lm_head)


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
        hidden_states = self._pre_head(outputs.last_hidden_state)
        logits, loss = None, None
        if labels is not None and self._uses_fused_loss():
            loss = self._fused_loss(hidden_states, labels, **kwargs)
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
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

    def _fused_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """transformers' `ForCausalLMLoss` without ever holding all logits.

        Args:
            hidden_states: (B, L, D), the input of the head.
            labels: (B, L), shifted here unless `shift_labels` is given.
            num_items_in_batch: number of targets over all accumulation steps; the sum is divided by it.
        """
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return fused_cross_entropy(
            hidden_states, self.lm_head, shift_labels.to(hidden_states.device), num_items_in_batch, ignore_index
        )


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
        hidden_states = self._pre_head(outputs.last_hidden_state)
        logits, loss = None, None
        if labels is not None and self._uses_fused_loss():
            targets, num_items = labels.to(hidden_states.device), kwargs.get("num_items_in_batch")
            loss = fused_cross_entropy(hidden_states, self.lm_head, targets, num_items)
        else:
            logits = self.lm_head(hidden_states)
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def is_plain_linear(head: nn.Module) -> bool:
    """A wrapped head (LoRA, quantization) has more than a weight, and tensor parallelism holds a shard of it: then it
    is called, as any module."""
    return type(head) is nn.Linear and type(head.weight) is nn.Parameter


def fused_cross_entropy(
    hidden_states: torch.Tensor,
    lm_head: nn.Module,
    targets: torch.Tensor,
    num_items: torch.Tensor | int | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Of (B, L, D) and (B, L): the mean over the targets, or the sum divided by `num_items`.

    A head with a `loss` of its own (an adaptive softmax) computes the sum itself.
    """
    if isinstance(lm_head, nn.Linear):
        reduction = "mean" if num_items is None else "sum"
        options = {"bias": lm_head.bias, "ignore_index": ignore_index, "reduction": reduction, "num_items": num_items}
        return linear_cross_entropy(hidden_states, lm_head.weight, targets, **options)
    count = (targets != ignore_index).sum() if num_items is None else num_items
    return lm_head.loss(hidden_states.flatten(0, 1), targets.flatten(), ignore_index) / count


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


class TokenClassificationHead(GenericForTokenClassification):
    """transformers' head, one class per token, over the family's base model `base_model_class`.

    The generic head asks `AutoModel` for the base model, which code exported with a checkpoint cannot do.
    """

    base_model_class: Callable[[Any], nn.Module]

    def __init__(self, config: PreTrainedConfig):
        super(GenericForTokenClassification, self).__init__(config)
        self.num_labels = config.num_labels
        self.model = self.base_model_class(config)
        self.dropout = nn.Dropout(_classifier_dropout(config))
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


def _classifier_dropout(config: PreTrainedConfig) -> float:
    """The first that the configuration has; 0.1, as in transformers, if it has none."""
    for name in ("classifier_dropout", "final_dropout", "hidden_dropout"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return 0.1


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


class HybridModelMixin:
    """The forward of a base model with `embed_tokens`, `layers` and `norm` (or None); placed before the family's
    `PreTrainedModel`.
    """

    config: Any
    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module | None
    is_bidirectional = False  # its tokens see the future: there is nothing to continue

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
        batch, length = inputs_embeds.shape[:2]
        if self.is_bidirectional:
            if past_key_values is not None:
                raise ValueError(
                    f"past_key_values cannot be used with a bidirectional {type(self).__name__}: its tokens see the "
                    "future."
                )
            use_cache = False
        if use_cache or past_key_values is not None:
            past_key_values = prepare_cache(past_key_values, self.config, batch)
        masks = attention_mask if isinstance(attention_mask, dict) else None  # made ahead of compiled decoding
        padding = attention_mask if masks is None else masks[STATE_LAYER_TYPE]
        is_generated = continues_documents and length == 1  # and real, whatever is known of the tokens before it
        unpadding = None if is_generated else unpadding_of(padding, batch, length)
        inputs = (seq_idx, position_ids, padding, unpadding, past_key_values, batch, length)
        keeps = self._packing_options(position_ids, masks)
        packed = resolve_packing(
            *inputs, cu_seq_lens_q=cu_seq_lens_q, continues_documents=continues_documents, **keeps
        )
        packed.open(past_key_values)
        hidden_states = self._run_layers(
            inputs_embeds, packed, unpadding, past_key_values, position_ids=position_ids, masks=masks, **kwargs
        )
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states if self.norm is None else self.norm(hidden_states),
            past_key_values=past_key_values if use_cache else None,
        )

    def _packing_options(self, position_ids: torch.Tensor | None, masks: dict | None) -> dict[str, Any]:
        """What `resolve_packing` keeps for the layers."""
        return {}

    def _run_layers(
        self,
        hidden_states: torch.Tensor,
        packed: PackedRows,
        unpadding: Unpadding | None,
        past_key_values: Cache | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(B, L, d) embeddings → (B, L, d) before the last norm; `kwargs` are for layers with positions or masks."""
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer while generation exits early
            # by name: gradient checkpointing takes the cache out, or a recompute would store the states twice
            hidden_states = layer(hidden_states, unpadding, packed.seq_idx, past_key_values=past_key_values)
        return hidden_states
