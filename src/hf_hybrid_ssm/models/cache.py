"""The cache layer that transformers lacks: named states of any shape, a token count, and exact rollback.

transformers' own `LinearAttentionLayer` does not serve: it has no length (`get_seq_length`), and once it holds a
recurrent state no `crop`, which assisted generation and prompt lookup need.

`DynamicCache(config=config)` and `StaticCache(config=config, ...)` build it for every layer whose `config.layer_types`
entry is one of `STATE_LAYER_TYPES`, so `generate()`, beam search, prompt reuse and continuation work as for any other
model.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeGuard

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin

from hf_hybrid_ssm.models.configuration import (
    STATE_AND_KEYS_LAYER_TYPE,
    STATE_LAYER_TYPE,
    WINDOW_LAYER_TYPE,
)
from hf_hybrid_ssm.models.packing import PackedRows, States, with_zero_rows
from hf_hybrid_ssm.models.unfinished import check_finished
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.pages import PagedState, ServedKeys

STATE_LAYER_TYPES = (STATE_LAYER_TYPE, WINDOW_LAYER_TYPE, STATE_AND_KEYS_LAYER_TYPE)

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

    _layer_type: str | None = STATE_LAYER_TYPE
    holds_states = True
    is_sliding = True  # it does not grow: masks are to be sized by a layer that does
    supports_early_init = False
    is_croppable = True
    max_cache_len: int | None = None  # room for tokens, of a static one
    keeps_all_tokens = False  # its attention has no window: it needs the keys of every token

    def __init__(self, **kwargs):
        super().__init__()
        self.states: States = {}
        self.packing_state: States = {}
        self.pages: torch.Tensor | None = None
        self.seen_tokens: int | torch.Tensor = 0
        self.is_torn = False  # its states are being replaced: they belong to no number of tokens
        self.record_past = False
        self.is_of_assistant = False  # see `let_assistant_forget`
        self.history: list[_RecordedForward] = []
        # runs a recomputation where the weights are; see `hf_hybrid_ssm.models.sharded_rollback`
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
        if self.pages is not None:
            return True
        if self.record_past or not self._made_without_gradient:
            return False
        if torch.compiler.is_compiling():
            return self.is_compileable
        inference = torch.is_inference_mode_enabled()
        return inference or not any(state.is_inference() for state in self.states.values())

    def hold_pages(self, states: States, pages: torch.Tensor) -> None:
        """Bind the layer to B pages of a server's state pool for one decoding step, which updates them in place.

        Args:
            states: name → memory of P pages (P, ...).
            pages: (B,) int64, the page of each text.
        """
        # an op takes it in the place of a state
        self.states = {name: PagedState(memory, pages) for name, memory in states.items()}  # type: ignore[misc]
        self.pages = pages
        self.seen_tokens = 1  # one column stands for all that went before
        self.is_initialized = True
        self.device = pages.device

    def hold_served(self, states: States, keys: ServedKeys, pages: torch.Tensor) -> None:
        """Bind the layer to B pages, with the keys of its full attention in the server's KV cache.

        Args:
            states: the layer's other states, name → tensor (B, ...), which a step may overwrite.
            keys: how the server attends.
            pages: (B,) int64, the page of each text.
        """
        self.states = {**states, "keys": keys}  # type: ignore[dict-item]
        self.pages = pages
        self.seen_tokens = 1
        self.is_initialized = True
        self.device = pages.device

    @property
    def batch_size(self) -> int:
        if not self.states:
            raise AttributeError("the layer holds no states yet")
        return (next(iter(self.states.values())) if self.pages is None else self.pages).shape[0]

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

    def reset(self) -> None:
        self.states, self.packing_state = {}, {}
        self.seen_tokens = 0
        self.history.clear()
        self.is_initialized = self.is_torn = False

    def reset_rows(self, begins: torch.Tensor) -> None:
        """Detach all states; where `begins` (B,) is true, a row gets the state before the first token, in every family
        zero."""
        self._apply(lambda state: with_zero_rows(state.detach(), begins))

    def zero_states(self, keep: Collection[str] = ()) -> None:
        """Forget what all states say but those named in `keep`."""
        self.states = {name: x if name in keep else torch.zeros_like(x) for name, x in self.states.items()}
        self.history.clear()

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

    update = lazy_initialization

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.states = {name: function(state) for name, state in self.states.items()}
        self.packing_state = {name: function(note) for name, note in self.packing_state.items()}
        self.history.clear()


class WindowLayer(RecurrentStateLayer):
    """`RecurrentStateLayer` for layers of the type `WINDOW_LAYER_TYPE`."""

    _layer_type = WINDOW_LAYER_TYPE


class StateAndKeysLayer(RecurrentStateLayer):
    """`RecurrentStateLayer` for layers of the type `STATE_AND_KEYS_LAYER_TYPE`."""

    _layer_type = STATE_AND_KEYS_LAYER_TYPE
    keeps_all_tokens = True


class StaticRecurrentStateLayer(RecurrentStateLayer):
    """`RecurrentStateLayer` for compiled decoding: the states keep their addresses and the token count is a tensor."""

    _layer_type = None
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
        self.seen_tokens.add_(rows.length)  # type: ignore[union-attr]
        self.is_torn = False

    def zero_states(self, keep: Collection[str] = ()) -> None:
        for name, state in self.states.items():
            if name not in keep:
                state.zero_()

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

    def _apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.packing_state = {name: function(note) for name, note in self.packing_state.items()}
        for name, state in self.states.items():
            mapped = function(state)
            if mapped.shape == state.shape and mapped.device == state.device:
                state.copy_(mapped)
            else:
                self.states[name] = mapped


class StaticStateAndKeysLayer(StaticRecurrentStateLayer):
    """`StaticRecurrentStateLayer` of a layer that keeps the keys of all tokens: it has no room for more than these."""

    keeps_all_tokens = True


STATIC_LAYER_TYPE_MAPPING.update(dict.fromkeys(STATE_LAYER_TYPES, StaticRecurrentStateLayer))
STATIC_LAYER_TYPE_MAPPING[STATE_AND_KEYS_LAYER_TYPE] = StaticStateAndKeysLayer


def is_recurrent_state_layer(layer: object) -> TypeGuard[RecurrentStateLayer]:
    """By a mark, not by its class: transformers makes the class registered last, and a process may hold several
    copies of this module (a folder's own code beside the package's, or two folders').
    """
    return getattr(layer, "holds_states", False)


def state_layer(cache: Cache, index: int) -> RecurrentStateLayer:
    """The states of one layer of a cache.

    Raises:
        TypeError: the cache keeps something else for that layer.
    """
    layer: Any = cache.layers[index]
    if not getattr(layer, "holds_states", False):  # as `is_recurrent_state_layer`; each decoded token comes here
        raise TypeError(f"layer {index} of cache is a {type(layer).__name__}, which holds no recurrent states.")
    return layer


def served_keys(cache: Cache, index: int) -> ServedKeys | None:
    """How a server attends in layer `index`, where it keeps the keys and values of transformers' own layer."""
    return getattr(cache.layers[index], "served", None) if index < len(cache.layers) else None


def holds_states(cache: Cache | None) -> bool:
    """Whether some layer has a state, which cannot be hidden from later tokens as keys and values can."""
    return any(map(is_recurrent_state_layer, getattr(cache, "layers", ())))


def let_assistant_forget(cache: Cache) -> None:
    """Mark the cache of a model that drafts for another (assisted generation), and is given the whole text each time.

    A target with another tokenizer may spell the last words anew, and go back further than to the round before.
    """
    for layer in getattr(cache, "self_attention_cache", cache).layers:
        if is_recurrent_state_layer(layer):
            layer.is_of_assistant = True


def has_forgotten(cache: Cache | None) -> bool:
    """Whether an assistant's cache had to forget all: its text is to be read with a new one."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return any(is_recurrent_state_layer(x) and x.is_of_assistant and not x.is_initialized for x in layers)


def carry_segment(cache: Cache, begins: torch.Tensor) -> None:
    """Make a cache, in place, the one that the next segment of every row starts from.

    No gradient goes back through it, and rows whose next segment begins a document start from zero.

    Args:
        cache: what a forward with `use_cache=True` returned.
        begins: (B,) bool.

    Raises:
        ValueError: a layer keeps keys and values of all tokens (full attention), which cannot reset a single row; or
            `begins` has another shape or dtype.
    """
    for index, layer in enumerate(cache.layers):
        if not is_recurrent_state_layer(layer):
            raise ValueError(
                f"layer {index} of cache is a {type(layer).__name__}; only layers with a state of fixed "
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


def tokens_and_packing_state(cache: Cache | None) -> tuple[int | torch.Tensor, States]:
    """The number of tokens in a cache and its packing state, from the first layer that has any: all hold the same.

    That is not always the first one: with pipeline parallelism the earlier layers are on other devices. A static
    cache's count is a tensor where reading it would cost (on an accelerator, while compiling).
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "is_initialized", False)]
    seen = layers[0].get_seq_length() if layers else 0
    if isinstance(seen, torch.Tensor) and seen.is_cpu and not torch.compiler.is_compiling():
        seen = int(seen)
    return seen, next((layer.packing_state for layer in layers if is_recurrent_state_layer(layer)), {})


def may_overwrite_states(cache: Cache | None) -> bool:
    """Whether a step may compute the next states of all layers in place of those in the cache."""
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "holds_states", False) and layer.states and not layer.may_be_overwritten():
            return False
    return True


def capacity_of(cache: Cache | None) -> int | None:
    """The tokens that a static cache has room for; None if it grows."""
    for layer in getattr(cache, "layers", ()):
        if getattr(layer, "holds_states", False):
            return layer.max_cache_len
    return None


FITTERS: dict[str, Callable[[Any, Any], None]] = {}
"""Model type → what `fit_cache` does for it."""


def fit_cache(cache: Cache, config: PreTrainedConfig) -> None:
    """Give an empty cache that was made by a configuration the layers that its model keeps: transformers makes that of
    a student as its teacher's."""
    if config.model_type in FITTERS:
        FITTERS[config.model_type](cache, config)


def prepare_cache(cache: Cache | None, config: PreTrainedConfig, batch_size: int, length: int = 0) -> Cache:
    """The cache of a forward of `length` tokens: a new one, or the given one if it fits the model and the batch.

    A `DynamicCache()` that was made without a config gets the layers of `config` while it is still empty; an empty
    layer becomes this family's.

    Raises:
        TypeError: `cache` is not a `Cache`.
        ValueError: it was made for or filled by another model, holds another batch size, or is half advanced.
        IndexError: it is static, and has no room for the tokens; where the host cannot read how many it holds, an
            assertion of the device, or of the compiled code.
    """
    if cache is None:
        cache = DynamicCache(config=config)
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise TypeError(
            f"cache must be a transformers Cache of one stack, got {type(cache).__name__}; make "
            "one with `DynamicCache(config=model.config)`."
        )
    if not cache.layers and isinstance(cache, DynamicCache):
        cache.layers = DynamicCache(config=config).layers
        cache.layer_class_to_replicate = None
    fit_cache(cache, config)
    layers, layer_types = cache.layers, getattr(config, "cache_layer_types", None) or config.layer_types
    wanted = [layer_type in STATE_LAYER_TYPES for layer_type in layer_types]
    if [is_recurrent_state_layer(layer) for layer in layers] != wanted:
        filled = any(
            getattr(layer, "is_initialized", False) and not is_recurrent_state_layer(layer) for layer in layers
        )
        advice = " A prefix of keys and values (PEFT's prefix tuning) has no place before a state: use prompt tuning "
        advice += "(PromptTuningConfig) or P-tuning (PromptEncoderConfig), which learn tokens."
        raise ValueError(
            f"cache has layers {[type(layer).__name__ for layer in layers]}, which are not those of this "
            f"model ({len(wanted)} layers, layer_types={layer_types}); make it with "
            f"`DynamicCache(config=model.config)`.{advice if filled else ''}"
        )
    for index, layer in enumerate(layers):
        _check_content(layer, index, config.model_type, batch_size)
    check_finished(cache)
    _check_room(cache, length)
    return cache


def _check_room(cache: Cache, length: int) -> None:
    """Attention to all tokens so far needs the keys of each; layers with a state or a window go on past any length."""
    rooms = [layer.max_cache_len for layer in cache.layers if layer.is_compileable and _keeps_all_tokens(layer)]
    if not rooms:
        return
    past = tokens_and_packing_state(cache)[0]
    message = (
        f"cache is static, with room for {rooms[0]} tokens: there is none for {{}} more, and attention to all tokens "
        "needs their keys. Make it with a larger max_cache_len, or use `DynamicCache(config=model.config)`."
    )
    if isinstance(past, torch.Tensor):
        torch._assert_async(past + length <= rooms[0], message.format(length))
    elif past + length > rooms[0]:
        raise IndexError(message.format(f"{length} after {past}"))


def _keeps_all_tokens(layer: Any) -> bool:
    """A layer of transformers that has no keys (a convolution, a recurrence) knows of no window either."""
    return layer.keeps_all_tokens if is_recurrent_state_layer(layer) else not getattr(layer, "is_sliding", True)


def _check_content(layer: CacheLayerMixin, index: int, model_type: str, batch_size: int) -> None:
    holds = is_recurrent_state_layer(layer)
    if holds:
        size = layer.batch_size if layer.states else None
    else:
        keys, size = getattr(layer, "keys", None), None
        if isinstance(keys, torch.Tensor) and keys.dim() == 4 and not torch.compiler.is_compiling():
            size = keys.shape[0]
    if size not in (None, batch_size):
        raise ValueError(f"cache holds a batch of {size} (layer {index}), but the input has a batch of {batch_size}.")
    if not holds or torch.compiler.is_compiling():
        return
    if layer.states and layer.model_type not in (None, model_type):
        raise ValueError(
            f"cache was filled by a model of the family {layer.model_type!r} (layer {index}), this model "
            f"is of the family {model_type!r}; make a new one with `DynamicCache(config=model.config)`."
        )
    layer.model_type = model_type


def check_cache_without_states(cache: Cache | None, rows: PackedRows) -> None:
    """A model with only full attention cannot cache a packing state: refuse pieces that would need it.

    Raises:
        ValueError: the cache holds documents or padding, and it is not known where.
    """
    if cache is None or holds_states(cache):
        return
    layer = cache.layers[0]
    not_cached = getattr(layer, "not_cached", {})
    if not isinstance(rows.past, int) or rows.past > 0:
        _refuse(not_cached.get("documents"), "several documents of packed rows", "read packed rows at once")
        if not rows.mask_covers_cache:
            _refuse(not_cached.get("padding"), "padding", "give an attention_mask of all tokens so far")
    layer.not_cached = {}
    if rows.starts is not None:
        layer.not_cached["documents"] = (rows.starts[:, -1] > 0).any()
    if rows.full_token_mask is not None:
        layer.not_cached["padding"] = ~rows.full_token_mask.all()


def _refuse(is_held: torch.Tensor | None, what: str, remedy: str) -> None:
    if is_held is None:
        return
    message = (
        f"cache holds {what}, and a model with only full attention does not keep where: {remedy}, or use a new cache."
    )
    if not can_read_values(is_held):
        torch._assert_async(~is_held, message)
    elif bool(is_held):
        raise ValueError(message)
