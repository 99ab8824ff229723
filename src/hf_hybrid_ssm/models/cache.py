"""What a forward does with its cache: make or check it, count its tokens, and mark it while its layers advance.

A cache that an error or an interrupt left half updated, its layers at different tokens, must not be reused. A forward
marks its cache before the first layer and takes the mark away after the last: two attributes of Python, and no
operation. Only a cache that bears the mark is looked at, by the next call.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig

from hf_hybrid_ssm.models.configuration import STATE_AND_KEYS_LAYER_TYPE, STATE_LAYER_TYPES
from hf_hybrid_ssm.models.packing import PackedRows, States, resolve_packing
from hf_hybrid_ssm.models.state_layers import Recompute, RecurrentStateLayer
from hf_hybrid_ssm.ops.core.pages import ServedKeys


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


def tokens_and_packing_state(cache: Cache | None) -> tuple[int | torch.Tensor, States]:
    """The number of tokens in a cache and its packing state, from the first layer that has any: all hold the same.

    That is not always the first one: with pipeline parallelism the earlier layers are on other devices. A static
    cache's count is a tensor where reading it would cost (on an accelerator, while compiling).
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "is_initialized", False)]
    seen = layers[0].get_seq_length() if layers else 0
    if isinstance(seen, torch.Tensor):
        # a copy: the first layer counts on in place, and a mask function asks again within each later one
        seen = int(seen) if seen.is_cpu and not torch.compiler.is_compiling() else seen.clone()
    return seen, next((layer.packing_state for layer in layers if is_recurrent_state_layer(layer)), {})


def read_rows(cache: Cache | None, shape: torch.Size | tuple[int, ...], **inputs: Any) -> PackedRows:
    """The rows (B, L) of a forward that goes on from a cache.

    Args:
        inputs: as of `resolve_packing`.
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "holds_states", False)]
    return resolve_packing(
        shape,
        tokens_and_packing_state(cache),
        return_final_state=cache is not None,
        capacity=layers[0].max_cache_len if layers else None,
        has_states=bool(layers),
        # a step may compute the next states of all layers in place of those in the cache
        may_overwrite=lambda: not [layer for layer in layers if layer.states and not layer.may_be_overwritten()],
        **inputs,
    )


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
    held = [is_recurrent_state_layer(layer) for layer in layers]
    # fewer layers run while generation exits early
    if held != wanted and held != wanted[: getattr(config, "num_decoder_layers", config.num_hidden_layers)]:
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
    _check_room(cache, layer_types, length)
    return cache


def _check_room(cache: Cache, layer_types: list[str], length: int) -> None:
    """Attention to all tokens so far needs the keys of each; layers with a state or a window go on past any length."""
    static = [(layer, kind) for layer, kind in zip(cache.layers, layer_types) if layer.is_compileable]
    rooms = [layer.max_cache_len for layer, kind in static if _keeps_all_tokens(layer, kind)]
    if not rooms:
        return
    past = tokens_and_packing_state(cache)[0]
    message = (
        f"cache is static, with room for {rooms[0]} tokens: there is none for {{}} more, and attention to all tokens "
        "needs their keys. Make it with a larger max_cache_len, or use `DynamicCache(config=model.config)`."
    )
    if isinstance(past, torch.Tensor):
        torch._assert_async(past + length <= rooms[0], message.format("any"))  # a graph of all lengths has no number
    elif past + length > rooms[0]:
        raise IndexError(message.format(f"{length} after {past}"))


def _keeps_all_tokens(layer: Any, kind: str) -> bool:
    """A layer of transformers that has no keys (a convolution, a recurrence) knows of no window either."""
    if is_recurrent_state_layer(layer):
        return kind == STATE_AND_KEYS_LAYER_TYPE
    return not getattr(layer, "is_sliding", True)


def _check_content(layer: Any, index: int, model_type: str, batch_size: int) -> None:
    holds = is_recurrent_state_layer(layer)
    if holds:
        size = layer.batch_size if layer.states else None
    else:
        keys, size = getattr(layer, "keys", None), None
        if isinstance(keys, torch.Tensor) and keys.dim() == 4 and not torch.compiler.is_compiling():
            size = keys.shape[0]
    if size is not None and size != batch_size:  # torch 2.13's compiler finds no symbolic size in a tuple
        raise ValueError(f"cache holds a batch of {size} (layer {index}), but the input has a batch of {batch_size}.")
    if not holds or torch.compiler.is_compiling():
        return
    if layer.states and layer.model_type not in (None, model_type):
        raise ValueError(
            f"cache was filled by a model of the family {layer.model_type!r} (layer {index}), this model "
            f"is of the family {model_type!r}; make a new one with `DynamicCache(config=model.config)`."
        )
    layer.model_type = model_type


def refuse_while_recomputing(model: Any, cache: Cache | None) -> bool:
    """Whether the layers of this forward are run again (gradient checkpointing): they take no cache, in which they
    would store their states twice.

    Raises:
        ValueError: the cache holds tokens, which would be forgotten.
    """
    if not (model.gradient_checkpointing and model.training and torch.is_grad_enabled()):
        return False
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "a cache that holds tokens cannot be used with gradient checkpointing, which reads a layer's input twice."
        )
    return True


def begin_forward(cache: Cache | None) -> None:
    """Mark a cache before its layers read more tokens."""
    if cache is not None and cache.layers and not torch.compiler.is_compiling():
        cache.layers[0].unfinished = True


def finish_forward(cache: Cache | None, model: Any) -> None:
    """Take the mark away: all layers have read the same tokens."""
    if cache is None or not cache.layers:
        return
    if not torch.compiler.is_compiling():
        cache.layers[0].unfinished = False
    remember_units(cache, model, model.layers)


def check_finished(cache: Cache) -> None:
    """
    Raises:
        ValueError: the last forward broke off, and the layers disagree about the tokens that they have read, or one of
            them was being overwritten.
    """
    layers = cache.layers
    if not layers or torch.compiler.is_compiling() or not getattr(layers[0], "unfinished", False):
        return
    counts = [int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")]
    if len(set(counts)) > 1 or any(getattr(layer, "is_torn", False) for layer in layers):
        raise ValueError(
            "cache is half advanced: the last forward with it broke off (an error or an interrupt), and its "
            f"layers have read {counts} tokens. Read the text again with a new cache, or go on with a copy that was "
            "made before (copy.deepcopy)."
        )


def remember_units(cache: Cache, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Tell the layers of a cache that records its past how to gather the weights of the model's blocks, if they are
    in shards: `crop` recomputes states outside of any `forward`, around which FSDP2 gathers them."""
    if not any(getattr(layer, "record_past", False) for layer in cache.layers):
        return
    units = [module for module in model.modules() if hasattr(module, "unshard")]
    if not units:
        return
    for layer, block in zip(cache.layers, blocks):
        parts = set(block.modules())
        layer.gathering = _gathering([unit for unit in units if unit in parts or block in set(unit.modules())])


def _gathering(units: list[Any]) -> Callable[[Recompute, PackedRows], States]:
    def run(recompute: Recompute, first: PackedRows) -> States:
        for unit in units:
            unit.unshard()
        try:
            return recompute(first)
        finally:
            for unit in units:
                unit.reshard()

    return run
