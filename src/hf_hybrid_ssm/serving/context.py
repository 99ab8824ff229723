"""A context is a file: what a model keeps of a text that it has read, to be continued later, often and elsewhere.

A recurrent state has one size, however long the text: kilobytes to a few megabytes. Reading a book once, saving what
is left of it, and continuing a hundred times gives what reading it a hundred times would give, to rounding.

The file is safetensors. Its header names the model (`serving.model_identity`: family, dtype, configuration, weights by
a fingerprint, adapters) and the number of tokens; a context of another model is refused, and so is a damaged file. A
digest covers header and tensors. Anybody can compute it: it guards against damage, and not against whoever can write
the file.
"""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import Cache, DynamicCache

from hf_hybrid_ssm.hub.fingerprint import fingerprint_of
from hf_hybrid_ssm.hub.one_line import in_one_line
from hf_hybrid_ssm.hub.writing import whole_file
from hf_hybrid_ssm.models.cache import is_recurrent_state_layer, prepare_cache, tokens_and_packing_state
from hf_hybrid_ssm.models.outputs import by_both_cache_names
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.ops.local_attention import AttentionState, in_order, newest_last
from hf_hybrid_ssm.serving.context_checks import DTYPES, check_header, check_tensors
from hf_hybrid_ssm.serving.model_identity import model_identity, unknown_code
from hf_hybrid_ssm.serving.state_layout import growing_layers

FORMAT, VERSION = "hf_hybrid_ssm.context", 3


class Context(NamedTuple):
    """What a file holds.

    Args:
        cache: the cache after `num_tokens` tokens.
        num_tokens: columns that the cache holds, padding included.
        tokens: (B, T ≥ num_tokens) int64, the text as `generate` wants it, or None where it was not saved. What goes
            beyond the cache has not been read yet, as the last token that `generate` returns.
        attention_mask: (B, T) int64, or None where it was not saved: the rows have no padding.
    """

    cache: Cache
    num_tokens: int
    tokens: torch.Tensor | None
    attention_mask: torch.Tensor | None

    @property
    def past_key_values(self) -> Cache:
        """`cache`, as transformers called it before 5.24."""
        return self.cache


@by_both_cache_names
def save_context(
    cache: Cache,
    path: str | os.PathLike,
    model: Any,
    *,
    tokens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    overwrite: bool = False,
) -> int:
    """Write what a model keeps of the text that it has read to a file; whole, or not at all.

    Every row of the batch is kept. Of packed rows, the last document of each is what continues. The recorded past of
    assisted generation is not kept: after loading, a cache goes back as far as the loaded context. A static cache is
    saved like any other, except where it reserves room for the keys of all tokens.

    Args:
        cache: after at least one token.
        path: the file to write.
        model: which has read the tokens, with the adapters that it had while it read them.
        tokens: (B, T) int, the text so far, T ≥ the tokens in the cache. `generate` asks for it to continue (and uses
            it, for a repetition penalty or prompt lookup); four bytes a token.
        attention_mask: (B, T), 1 for text and 0 for padding.
        overwrite: an existing file may be replaced.

    Returns:
        Bytes written.

    Raises:
        FileExistsError: there is such a file, and `overwrite` is not set.
        OSError: the file cannot be written, or not all of it; what was there stays.
        ValueError: the cache is empty, of another model, holds NaN, or is static with room for all keys; tokens or
            mask of another shape; code that no file can name runs in the model's forward (a hook, another `forward`).
        TypeError: the cache is that of an encoder-decoder, or not a cache.

    Warns:
        UserWarning: a layer keeps the keys and values of all tokens, so that the file grows with the text.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists: choose another name, or allow overwriting.")
    text = {"tokens": tokens, "attention_mask": attention_mask}
    given = {name: value for name, value in text.items() if value is not None}
    size = write_context(cache, path, model, _nameable(model), given)
    if growing := growing_layers(model):
        warnings.warn(
            f"layers {growing} keep the keys and values of all tokens: the context of {int(cache.get_seq_length()):,} "
            f"tokens has {size:,} bytes, and grows with the text.",
            stacklevel=3,  # past the wrapper for the names of the cache
        )
    return size


def write_context(cache: Cache, path: Path, model: Any, identity: dict[str, Any], text: States) -> int:
    """`save_context` over what is there, without a warning.

    Args:
        identity: `model_identity` of the model.
        text: "tokens" and "attention_mask", as far as they are saved.
    """
    tensors = _held(cache, model)
    num_tokens, batch = int(cache.get_seq_length()), next(iter(tensors.values())).shape[0]
    tensors |= {name: _of_text(name, value, batch, num_tokens) for name, value in text.items()}
    growing = growing_layers(model)
    if growing and any(layer.is_compileable for layer in cache.layers):
        raise ValueError(
            f"the cache is static, and layers {growing} reserve room in it for the keys of all tokens: "
            "read the text with `DynamicCache(config=model.config)`."
        )
    header = identity | {"num_tokens": num_tokens}
    check_tensors(path, tensors, num_tokens, model)
    written = json.dumps(header | {"content": _digest(header, tensors)})
    return _write(path, tensors, {"format": FORMAT, "version": str(VERSION), "context": written})


@by_both_cache_names
def load_context(path: str | os.PathLike, model: Any, *, cache: Cache | None = None) -> Context:
    """Read a file of `save_context` for the model that wrote it.

    The cache belongs to the caller, and continuing changes it: to continue several times, load again or take copies
    (`copy.deepcopy`).

    ```python
    >>> context = load_context("book.safetensors", model)
    >>> text = torch.cat([context.tokens, question], dim=1)
    >>> answer = model.generate(text, cache=context.cache)
    ```

    Args:
        path: the file.
        model: of the same family, configuration, weights and dtype as the one that read the text, on any device, with
            the same adapters switched on as then.
        cache: an empty cache to fill, such as a `StaticCache`; by default a `DynamicCache`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is not a context, or is that of another model; or `cache` is not
            empty, or reserves room for the keys of all tokens; or code that no file can name runs in the model's
            forward.
    """
    path = Path(path)
    header, tensors = _read(path)
    _check_identity(path, header, model)
    check_tensors(path, tensors, header["num_tokens"], model)
    cache = DynamicCache(config=model.config) if cache is None else cache
    num_tokens, decoder = header["num_tokens"], model.get_decoder()
    if cache.get_seq_length() > 0:
        raise ValueError(f"cache holds {int(cache.get_seq_length())} tokens: give an empty cache.")
    if any(layer.is_compileable for layer in cache.layers) and (growing := growing_layers(model)):
        raise ValueError(f"the cache is static, and layers {growing} reserve room in it for all keys.")
    tokens, mask = (None if name not in tensors else tensors.pop(name).to(model.device).long() for name in DTYPES)
    prepare_cache(cache, model.config, next(iter(tensors.values())).shape[0])
    packing_state = _below("packing_state", tensors, model.device)
    for index, layer in enumerate(cache.layers):
        states = _below(f"layers.{index}", tensors, next(decoder.layers[index].parameters()).device)
        if is_recurrent_state_layer(layer):
            rows = PackedRows(length=num_tokens, packing_state=packing_state)
            with torch.no_grad():
                layer.update_states(rows, _windows(states, in_order) if layer.is_compileable else states)
        else:
            layer.update(states["keys"], states["values"])
            layer.not_cached = _below("unkept", tensors, model.device)
    return Context(cache, num_tokens, tokens, mask)


def _below(prefix: str, tensors: States, device: torch.device) -> States:
    names = [name for name in tensors if name.startswith(f"{prefix}.")]
    return {name.removeprefix(f"{prefix}."): tensors[name].to(device) for name in names}


def _held(cache: Cache, model: Any) -> States:
    """Everything that a cache holds, by name, in copies on the CPU; the first has the batch in front."""
    layers: Any = getattr(cache, "layers", ())
    parts = [_of_layer(layer) for layer in layers] if any(layer.is_initialized for layer in layers) else []
    prepare_cache(cache, model.config, next(iter(parts[0].values())).shape[0] if parts else 1)
    if not parts:
        raise ValueError("cache is empty: nothing has been read yet.")
    tensors = {f"layers.{index}.{name}": state for index, states in enumerate(parts) for name, state in states.items()}
    tensors |= {f"packing_state.{name}": tensor for name, tensor in tokens_and_packing_state(cache)[1].items()}
    tensors |= {f"unkept.{name}": flag for name, flag in getattr(layers[0], "not_cached", {}).items()}
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }


def _of_layer(layer: Any) -> States:
    """As a dynamic cache holds them."""
    if is_recurrent_state_layer(layer):
        return _windows(layer.states, newest_last) if layer.is_compileable else layer.states
    return {"keys": layer.keys, "values": layer.values}


def _windows(states: States, turned: Callable[[AttentionState], AttentionState]) -> States:
    """With the function of each window in its place: of `keys`, `values` and `seen` with one prefix."""
    prefixes = [name.removesuffix("keys") for name in states if name.endswith("keys")]
    for names in ([prefix + field for field in AttentionState._fields] for prefix in prefixes):
        if states.keys() >= set(names):
            states = states | dict(zip(names, turned(AttentionState(*(states[name] for name in names)))))
    return states


def _of_text(name: str, value: torch.Tensor, batch: int, num_tokens: int) -> torch.Tensor:
    if value.dim() != 2 or value.shape[0] != batch or value.shape[1] < num_tokens:
        raise ValueError(
            f"{name} must have shape (batch, tokens so far) = ({batch}, at least {num_tokens}), got "
            f"{tuple(value.shape)}."
        )
    return value.detach().cpu().to(DTYPES[name])


def _nameable(model: Any) -> dict[str, Any]:
    """What a context is bound to."""
    if (code := unknown_code(model)) is not None:
        raise ValueError(
            f"{code} may change what the model computes, and no context can name it: take it away to save or load one."
        )
    return model_identity(model)


def _check_identity(path: Path, header: dict[str, Any], model: Any) -> None:
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{path} is for a single stack: a {config.model_type!r} model reads its source at once.")
    if header["family"] != config.model_type:
        raise ValueError(
            f"{path} was read by a model of the family {header['family']!r}, this one is {config.model_type!r}."
        )
    now = _nameable(model)
    _refuse_difference(path, header["configuration"], now["configuration"])
    _refuse_difference(path, header["computation"], now["computation"])
    if header["dtype"] != now["dtype"]:
        raise ValueError(f"{path} was read in {header['dtype']}, this model computes in {now['dtype']}.")
    if header["weights"] != now["weights"]:
        raise ValueError(
            f"{path} was read by other weights (fingerprint {header['weights'][:12]}, this model's are "
            f"{now['weights'][:12]})."
        )


def _refuse_difference(path: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            values = f"{name}={then.get(name)}, this model has {name}={now.get(name)}."
            raise ValueError(f"{path} was read with {in_one_line(values)}")


def _digest(header: dict[str, Any], tensors: States) -> str:
    """Of everything that the file says, in whatever order."""
    return fingerprint_of(tensors, f"{json.dumps(header, sort_keys=True)}\n")


def _write(path: Path, tensors: States, metadata: dict[str, str]) -> int:
    """A file that is there is complete."""
    with whole_file(path) as beside:
        try:
            save_file(tensors, beside, metadata)
        except SafetensorError as error:  # a full disk among them
            raise OSError(f"{path} could not be written: {error}") from error
        return beside.stat().st_size


def _read(path: Path) -> tuple[dict[str, Any], States]:
    """The header and the tensors of a file that is as it was written."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a context: `save_context` or `hf-hybrid-ssm read` writes one.")
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path} is a context of version {metadata.get('version')}, and this package reads {VERSION}."
        )
    try:
        header = json.loads(metadata["context"])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {type(error).__name__}") from error
    check_header(path, header)
    if header.pop("content") != _digest(header, tensors):
        raise ValueError(f"{path} is damaged: its content is not what its header says.")
    return header, tensors
