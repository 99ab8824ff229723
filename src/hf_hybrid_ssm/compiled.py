"""Compiled decoding on a CPU: the settings with which `generate` of transformers compiles its step once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig

from hf_hybrid_ssm.kept_programs import CAN_KEEP, KeptStep

INSIDE = "._modules["
OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
"""What PEFT's layers say of themselves."""
HAS_FILTERS = hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")  # torch 2.8


def compiled_decoding(**options: Any) -> CompileConfig:
    """What `generate` is given to compile the step that writes a token, on a CPU too::

        model.generate(**inputs, cache_implementation="static", max_cache_len=4096, compile_config=compiled_decoding())

    The prompt is read as always. The first token that this model writes takes as long as compiling does, a minute or
    two for 30 layers; later calls of `generate` with the same batch size and `max_cache_len` find it compiled, and so
    does another process, after some seconds: the program is kept in `programs` in the cache folder
    (HF_HYBRID_SSM_CACHE), and what torch's backend made in TORCHINDUCTOR_CACHE_DIR. Both may be deleted. Versions of
    torch that write no programs down (2.6, say) trace the model again in every process.

    The modules, hooks, adapters, switches and the cache are looked at once in each call of `generate`, which compiles
    anew where they changed, not before every token. Weights may change.

    Args:
        options: of torch's inductor backend, such as `max_autotune=True`.

    Returns:
        A new configuration, for calls of `generate`; it is not saved with a model.
    """
    if HAS_FILTERS:
        options = {"guard_filter_fn": outside_of_modules} | options
    config = _CompiledDecoding(fullgraph=True, dynamic=False, mode=None, options=options)
    config._compile_all_devices = True  # transformers compiles for accelerators alone
    return config


class _CompiledDecoding(CompileConfig):
    """What `generate` asks for the program of its step."""

    def kept_or_renewed(self, model: nn.Module, compiled: Callable) -> Callable:
        """A program that is kept. Where torch keeps none, it forgets its programs if modules are not what they were
        when this model was last compiled without guards on them."""
        if (self.options or {}).get("guard_filter_fn") is not outside_of_modules:
            return compiled
        if CAN_KEEP and self.backend == "inductor":
            return KeptStep(model, self, lambda: _renewed(model, compiled))
        return _renewed(model, compiled)


def _renewed(model: nn.Module, compiled: Callable) -> Callable:
    now = [_what_guards_would_see(module) for module in model.modules()]
    if vars(model).get("_compiled_modules", now) != now:
        torch.compiler.reset()
    vars(model)["_compiled_modules"] = now
    return compiled


def _what_guards_would_see(module: nn.Module) -> tuple[Any, ...]:
    """The module itself, its code and hooks, and what switches it: of a layer of PEFT its adapters too."""
    own = vars(module)
    switches = [(name, value) for name, value in own.items() if isinstance(value, bool | float | str)]
    is_adapted = not callable(getattr(module, "active_adapters", print))  # transformers' models have a method so named
    adapters = [repr(getattr(module, name, None)) for name in OF_ADAPTERS] if is_adapted else None
    hooks = tuple(module._forward_hooks), tuple(module._forward_pre_hooks)
    return id(module), type(module), own.get("forward"), hooks, switches, adapters


def outside_of_modules(guards: Sequence[Any]) -> list[bool]:
    """Which of torch's guards are looked at before each token: on the modules inside of the model, which have tens of
    each, only those on dictionaries, where layers keep what they have computed, on tensors that are the same, and on
    the embeddings and the head, which get another dtype when all get one."""
    return [_is_kept(guard) for guard in guards]


def _is_kept(guard: Any) -> bool:
    kind, name = guard.guard_type, guard.name
    if kind == "SEQUENCE_LENGTH":
        return INSIDE not in name or isinstance(guard.value, dict) or "dict.keys(" in name
    return name.count(INSIDE) <= (2 if kind == "TENSOR_MATCH" else 0) or kind.startswith(("DICT", "DUPLICATE"))


__all__ = ["compiled_decoding"]
