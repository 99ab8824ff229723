"""The cache layer that transformers lacks: named states of any shape, a token count, and exact rollback.

transformers' own `LinearAttentionLayer` does not serve: it has no length (`get_seq_length`), and once it holds a
recurrent state no `crop`, which assisted generation and prompt lookup need.

`DynamicCache(config=config)` and `StaticCache(config=config, ...)` build it for every layer whose `config.layer_types`
entry is one of `STATE_LAYER_TYPES`, so `generate()`, beam search, prompt reuse and continuation work as for any other
model.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from hf_hybrid_ssm.models.configuration import HOOKS, STATE_LAYER_TYPES
from hf_hybrid_ssm.models.packing import PackedRows, States

Recompute = Callable[[PackedRows], States]


class _RecordedForward(NamedTuple):
    """What it takes to undo one forward, wholly or in part."""

    rows: PackedRows
    previous: States
    previous_packing_state: States
    recompute: Recompute | None
    with_gradient: bool


def _in_place(recompute: Recompute, first: PackedRows) -> States:
    return recompute(first)


class RecurrentStateLayer(CacheLayerMixin):
    """The states of one layer between two forwards: `states[name]`, each with the batch in front.

    Unlike keys and values, a state of fixed size forgets how it came about. To go back (`crop`, as assisted generation
    and prompt lookup do) the layer keeps, once `activate_past_recording()` was called, the states before each forward
    and a function that recomputes those after the first tokens of that forward.

    While no past is recorded, a forward of one token without gradients may update the states in place. To keep the
    present ones, copy the cache first (`copy.deepcopy`).

    `packing_state` says which document each row is in (see `hf_hybrid_ssm.models.packing`); it is empty until rows are
    packed.
    """

    holds_states = True
    is_sliding = True  # it does not grow: masks are to be sized by a layer that does
    supports_early_init = False
    is_croppable = True
    max_cache_len: int | None = None  # room for tokens, of a static one

    def __init__(self, **kwargs):
        super().__init__()
        self.states: States = {}
        self.packing_state: States = {}
        self.seen_tokens: Any = 0  # an int; in a static cache a tensor
        self.is_torn = False  # its states are being replaced: they belong to no number of tokens
        self.record_past = False
        self.is_of_assistant = False  # see `let_assistant_forget`
        self.history: list[_RecordedForward] = []
        # runs a recomputation where the weights are; see `cache.remember_units`
        self.gathering: Callable[[Recompute, PackedRows], States] = _in_place
        self._made_without_gradient = False
        self.device: torch.device | None = None
        self.model_type: str | None = None

    def states_before(self) -> States:
        """The states before the tokens of a forward, empty before the first one.

        A model's layer asks for them once a forward, before it mixes its rows, and calls `update_states` once after
        that. So a layer of the cache may fetch them from elsewhere, as in sequence parallelism.
        """
        return self.states

    def update_states(self, rows: PackedRows, states: States, recompute: Recompute | None = None) -> None:
        """Replace the states by those after more tokens.

        Args:
            rows: of the forward. With `rows.overwrites_states` the states may be the same tensors, which were updated
                in place, while the layer was marked as torn.
            states: name → tensor (B, ...). Every name of the layer is given at every call.
            recompute: `recompute(rows.first(n))` returns the states after the first n < L tokens of this forward;
                called only by `crop`, and kept only while the past is recorded. Without it, `crop` can undo this
                forward only as a whole, as it does one of a single token.
        """
        if rows.overwrites_states:
            self.states, self.packing_state = states, rows.packing_state
            self.seen_tokens += 1
            self.is_torn = False
            return
        if self.record_past:
            self.history.append(
                _RecordedForward(rows, self.states, self.packing_state, recompute, torch.is_grad_enabled())
            )
        self.is_torn = True
        self.states = {name: _clone_if_view(state) for name, state in states.items()}
        self.packing_state = rows.packing_state
        self.seen_tokens += rows.length
        self.is_torn = False
        self.is_initialized = True
        if states:  # a server may keep all that there is
            self.device = next(iter(states.values())).device
        self._made_without_gradient = not torch.is_grad_enabled()

    def may_be_overwritten(self) -> bool:
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
        """Forget the last `-tokens_to_remove` tokens, then drop the recording. The tokens must lie within it: an
        assistant's layer forgets all where they do not."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be negative: the number of tokens to remove.")
        if not self.record_past:
            raise RuntimeError(
                "crop needs the recorded past: call `activate_past_recording()` on the cache before the forwards that "
                "may have to be undone."
            )
        recorded = sum(forward.rows.length for forward in self.history)
        if -tokens_to_remove > recorded and self.is_of_assistant:
            self.reset()
            return
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} goes {-tokens_to_remove - recorded} tokens beyond the recorded "
                "past, which starts at the last `crop`."
            )
        remaining = -tokens_to_remove
        while remaining > 0:
            forward = self.history[-1]
            length = forward.rows.length
            length_left = max(length - remaining, 0)
            if length_left and forward.recompute is None:
                raise RuntimeError(
                    f"tokens_to_remove={tokens_to_remove} goes back into a forward of {length} tokens whose states "
                    "were given without a way to recompute them: remove all of its tokens or none."
                )
            self.history.pop()
            self.states, self.packing_state = forward.previous, forward.previous_packing_state
            if length_left and forward.recompute is not None:
                first = forward.rows.first(length_left)
                with torch.set_grad_enabled(forward.with_gradient):
                    self.states = self.gathering(forward.recompute, first)
                self.packing_state = first.packing_state
            self.seen_tokens -= length - length_left
            remaining -= length - length_left
        self.history.clear()

    def copy(self) -> Self:
        """With tensors of its own, each of no more memory than its numbers; without a recorded past."""
        twin = copy.copy(self)
        twin.states = {name: own_tensor(state) for name, state in self.states.items()}
        twin.packing_state = {name: own_tensor(note) for name, note in self.packing_state.items()}
        twin.seen_tokens, twin.history = own_tensor(self.seen_tokens), []
        return twin

    def reset(self) -> None:
        self.states, self.packing_state = {}, {}
        self.seen_tokens = 0
        self.history.clear()
        self.is_initialized = self.is_torn = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_states(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        self.map_states(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.map_states(lambda state: state.to(self.device, non_blocking=True))

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen_tokens + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, *args, **kwargs) -> None:
        raise TypeError("a RecurrentStateLayer holds no keys and values; its mixer calls `update_states`.")

    update = lazy_initialization

    def map_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the function of each tensor in its place, in `packing_state` too; without a recorded past."""
        self.states = {name: function(state) for name, state in self.states.items()}
        self.packing_state = {name: function(note) for name, note in self.packing_state.items()}
        self.history.clear()


class StaticRecurrentStateLayer(RecurrentStateLayer):
    """`RecurrentStateLayer` for compiled decoding: the states keep their addresses and the token count is a tensor."""

    is_compileable = True
    is_croppable = False
    max_cache_len: int

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__()
        self.max_cache_len = max_cache_len

    def update_states(self, rows: PackedRows, states: States, recompute: Recompute | None = None) -> None:
        if not self.is_initialized:
            self._allocate(states)
        self._made_without_gradient = True  # they are copies
        self.is_torn = True
        self.packing_state = rows.packing_state
        for name, state in states.items():
            if state is not self.states[name]:
                self.states[name].copy_(state)
        self.seen_tokens.add_(rows.length)
        self.is_torn = False

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
        self.packing_state, self.is_torn = {}, False
        if isinstance(self.seen_tokens, torch.Tensor):  # zeros are the state before the first token in every family
            for tensor in (*self.states.values(), self.seen_tokens):
                tensor.zero_()

    def map_states(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.packing_state = {name: function(note) for name, note in self.packing_state.items()}
        for name, state in self.states.items():
            mapped = function(state)
            if mapped.shape == state.shape and mapped.device == state.device:
                state.copy_(mapped)
            else:
                self.states[name] = mapped


def register_layer_types() -> None:
    """Caches that transformers makes of a configuration get these layers."""
    DYNAMIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(STATE_LAYER_TYPES, RecurrentStateLayer))
    STATIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(STATE_LAYER_TYPES, StaticRecurrentStateLayer))


register_layer_types()
HOOKS.register_layer_types = register_layer_types


def _clone_if_view(state: torch.Tensor) -> torch.Tensor:
    """A small view must not keep the activations of a whole prompt alive."""
    if not torch.compiler.is_compiling() and state.untyped_storage().nbytes() > state.numel() * state.element_size():
        return state.clone()
    return state


def own_tensor(tensor: Any) -> Any:
    """A copy of a tensor of no more memory than its numbers; anything else as it is."""
    is_tensor = isinstance(tensor, torch.Tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format) if is_tensor else tensor
