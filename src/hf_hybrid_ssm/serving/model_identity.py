"""What states of a text depend on: the model that read it, with all that it computes with.

States are worth nothing to another model, and do not show it. So contexts in files and copies of a cache of prefixes
are given to the model of the same identity alone: its family, dtype, configuration and weights, and what else changes
its numbers (adapters that are switched on, attributes that were set). Code that someone has put in between, a hook or
another `forward`, has no name that another process would know: `unknown_code` tells where there is some.
"""

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from hf_hybrid_ssm.compiled import OF_ADAPTERS
from hf_hybrid_ssm.hub.fingerprint import bytes_of, fingerprint_of

# parts of the names of what changes neither a state nor what follows from it
WITHOUT_EFFECT = (
    *("dropout", "_token_id", "use_cache", "use_linear_cross_entropy", "initializer_range"),
    *("gradient_checkpointing", "name_or_path", "all_tied_weights_keys", "is_packed"),
)
# whose hooks move and record tensors, or compute from parameters and buffers alone
KNOWN_CODE = ("accelerate", "peft", "torch", "transformers")
OF_STUDENTS = "hf_hybrid_ssm.students.memory"  # whose hooks bring a memory what it reads, as the configuration says
PLAIN = (bool, int, float, str, type(None), tuple, list, dict, set, torch.dtype)

Attributes = dict[str, tuple[type, dict[str, str]]]
"""Of every module by its name: class, and plain attributes as they are written."""


def model_identity(model: Any) -> dict[str, Any]:
    """What states in a file are bound to, as JSON gives it back: `_all_but_weights`, and `fingerprint_of` everything
    that the decoder saves. Its head takes no part.

    Raises:
        ValueError: weights are on the meta device (offloaded, or never loaded).
    """
    return _all_but_weights(model) | {"weights": fingerprint_of(model.get_decoder().state_dict())}


def _all_but_weights(model: Any) -> dict[str, Any]:
    """
    `computation` is what differs from a model that is made from the configuration: the name of a module's attribute →
    its value, the name of another module → its class. It is empty of a model in evaluation mode to which nobody has
    done anything.
    """
    decoder = model.get_decoder()
    return {
        "family": decoder.config.model_type,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "configuration": architecture(decoder.config),
        "computation": _computation(decoder),
    }


def identity_now(model: Any) -> str:
    """A digest of identity, weights, devices and autocast: equal for two calls if the decoder computes the same.

    It reads all weights once, as a token does (CRC-32, so that no write escapes), and on an accelerator copies them to
    the CPU; a fingerprint takes longer.
    """
    decoder = model.get_decoder()
    weights = [
        (name, str(tensor.dtype), tuple(tensor.shape), str(tensor.device), _checksum(tensor))
        for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())
    ]
    device = next(decoder.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    kind = f"{type(decoder).__module__}.{type(decoder).__qualname__}"
    known = json.dumps(_all_but_weights(model), sort_keys=True)
    return hashlib.sha256(f"{kind}\n{known}\n{autocast}\n{weights}".encode()).hexdigest()


def architecture(config: Any) -> dict[str, Any]:
    """The fields of a family's configuration that a state depends on, as JSON gives them back."""
    usual = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = (field.name for field in dataclasses.fields(config) if field.name not in usual)
    return json.loads(json.dumps({name: getattr(config, name, None) for name in own if _has_effect(name)}))


def unknown_code(model: Any) -> str | None:
    """What runs in a forward beside the classes' own code, by the name of its module; None if nothing does."""
    if _others(nn_module._global_forward_hooks) or _others(nn_module._global_forward_pre_hooks):
        return "a forward hook of all modules"
    decoder = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    modules = [("", model), *((f"{path}.{name}".strip("."), module) for name, module in decoder.named_modules())]
    for name, module in modules:
        where = name or type(module).__name__
        if _others(module._forward_hooks) or _others(module._forward_pre_hooks):
            return f"a forward hook of {where}"
        if not _is_own_forward(module):
            return f"another forward of {where}"
    return None


def _others(hooks: dict[int, Any]) -> bool:
    return any(
        _origin(hook) not in KNOWN_CODE and getattr(hook, "__module__", None) != OF_STUDENTS for hook in hooks.values()
    )


def _origin(code: Any) -> str:
    """The package that a function, a method or an object that is called comes from."""
    code = getattr(code, "func", code)  # a partial
    return (getattr(code, "__module__", None) or type(code).__module__).partition(".")[0]


def _is_own_forward(module: nn.Module) -> bool:
    """Whether `forward` is the one that the module's class defines, or that of a known library."""
    if "forward" in vars(module):
        return _origin(vars(module)["forward"]) in KNOWN_CODE
    forward = type(module).forward
    written = {f"{kind.__qualname__}.forward" for kind in type(module).__mro__}
    return getattr(forward, "__qualname__", None) in written or _origin(forward) in KNOWN_CODE


def _computation(decoder: nn.Module) -> dict[str, str]:
    """See `model_identity`."""
    usual, modules = _usual_attributes(decoder), dict(decoder.named_modules())
    found: dict[str, str] = {}
    inside: list[str] = []
    training = [name for name, module in modules.items() if module.training]
    if training:
        found["training"] = "all modules" if decoder.training else ", ".join(training)
    found |= {name: "nothing" for name in usual if name not in modules}
    for name, module in modules.items():
        own = name
        if any(name.startswith(f"{adapter}.") for adapter in inside):
            own, _, leaf = name.rpartition(".")
            if leaf != "base_layer" or own not in inside:  # the adapter's tensors are among the weights
                continue
        if not callable(getattr(module, "active_adapters", _shown)):  # transformers' models have a method of this name
            inside.append(name)
            found |= {f"{name}.{switch}": repr(getattr(module, switch, None)) for switch in OF_ADAPTERS}
            continue
        kind, values = usual.get(own, (type(None), {}))
        attributes = dict(_attributes(module))
        if not isinstance(module, kind):
            found[name] = f"{type(module).__module__}.{type(module).__qualname__}"
            values = dict.fromkeys(attributes, "")
        for attribute, value in values.items():
            full = f"{name}.{attribute}".strip(".")
            if _has_effect(full) and attributes.get(attribute) != value:
                found[full] = attributes.get(attribute, "nothing")
    return found


# by class, dtype and what the configuration says
_USUAL: dict[tuple[type, torch.dtype, str], Attributes] = {}


def _usual_attributes(decoder: Any) -> Attributes:
    """Those of a model that is made from the configuration; it has no weights."""
    key = type(decoder), decoder.dtype, json.dumps(architecture(decoder.config), sort_keys=True)
    if key not in _USUAL:
        with torch.device("meta"):
            twin = type(decoder)._from_config(decoder.config, dtype=decoder.dtype)
        _USUAL[key] = {name: (type(module), dict(_attributes(module))) for name, module in twin.named_modules()}
    return _USUAL[key]


def _attributes(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Public attributes, as they are written: numbers, names, and functions by theirs."""
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        is_values = dataclasses.is_dataclass(value) and not isinstance(value, PreTrainedConfig)
        written = repr(value) if is_values or isinstance(value, PLAIN) else getattr(value, "__qualname__", "")
        if written and " at 0x" not in written:  # the address of something within
            yield name, written


def _has_effect(name: str) -> bool:
    return not any(part in name for part in WITHOUT_EFFECT)


def _shown() -> None:
    """Callable, as what a module has that is no adapter."""


def _checksum(tensor: torch.Tensor) -> int | tuple[Any, ...]:
    if is_traceable_wrapper_subclass(tensor):  # quantized: the tensors that it is made of
        names, _ = tensor.__tensor_flatten__()
        return tuple(_checksum(getattr(tensor, name)) for name in names)
    if tensor.is_meta:
        raise ValueError("a weight is on the meta device, where it has no values to compare: load the model whole.")
    return zlib.crc32(bytes_of(tensor))
