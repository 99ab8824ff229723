"""Programs of compiled decoding that outlive their process.

torch's own cache on disk holds what its backend makes of a graph; the graph itself is traced anew by each process,
which for 30 layers takes most of half a minute. torch can also write down a whole traced and compiled function
(`torch.compile(...).aot_compile`), but binds it to nothing that a model is. So a program is kept here under a hash of
all that tracing looks at (`_described`: of modules, inputs and cache the classes, plain attributes, functions by their
code, and of tensors all but their values), and the sources that were traced are compared when it is read.

What torch cannot write down is compiled by `torch.compile` as ever. A program is code: one that others could have
written is not read (`unsafe`).
"""

import functools
import hashlib
import importlib
import inspect
import logging
import os
import platform
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as nn_module
from transformers import CompileConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_hybrid_ssm.models.outputs import CACHE, OLD
from hf_hybrid_ssm.ops.core import instruction_sets
from hf_hybrid_ssm.ops.core.cache_folder import cache_folder, unsafe
from hf_hybrid_ssm.ops.core.dispatch import forced_backend
from hf_hybrid_ssm.ops.core.transforms import float32_precision

logger = logging.getLogger(__name__)

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
UNREAD = {
    *("_compiled_call", "_last_compile_config", "_compiled_modules", "generation_config", "name_or_path"),
    "_kernel_cache",
}
"""Attributes that no step reads."""
GLOBAL_HOOKS = nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks
MORE_OUTPUTS = ("output_hidden_states", "output_attentions")

_programs: dict[str, Callable | None] = {}
"""Those of this process by their hash; None where torch cannot write one down."""


class KeptStep:
    """What one call of `generate` calls for each token: a program that is kept, else what `otherwise` returns."""

    def __init__(self, model: Any, config: CompileConfig, otherwise: Callable[[], Callable]):
        self.model, self.config, self.otherwise = model, config, otherwise
        self._looked_at: Any = None
        self._program: Callable | None = None
        self._compiled: Callable | None = None

    def __call__(self, **inputs: Any) -> Any:
        # modules and the layers of the cache are looked at once
        now = [(name, _brief(value)) for name, value in inputs.items()]
        if now != self._looked_at:
            self._program, self._looked_at = self._found(inputs), now
        if self._program is None:
            self._compiled = self._compiled or self.otherwise()
            return self._compiled(**inputs)
        cache = inputs.get(CACHE, inputs.get(OLD))
        return CausalLMOutputWithPast(logits=self._program(self.model, inputs), **{CACHE: cache})

    def _found(self, inputs: dict[str, Any]) -> Callable | None:
        if self.model.config.is_encoder_decoder or any(inputs.get(name) for name in MORE_OUTPUTS):
            return None
        key = _key(self.model, self.config, inputs)
        if key not in _programs:
            _programs[key] = _read(key) or _made(key, self.model, self.config, inputs)
        return _programs[key]


def _step(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """The logits alone: an output of transformers is no value that a program returns."""
    return model(**inputs).logits


def _made(key: str, model: Any, config: CompileConfig, inputs: dict[str, Any]) -> Callable | None:
    """A new program, which is written to disk; it is None, and `torch.compile` the way, where torch cannot."""
    logger.info("compiling the step that writes a token, which takes a minute or two for 30 layers ...")
    begun = time.perf_counter()
    settings = config.to_dict()
    settings["options"] = dict(settings["options"]) | {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    try:
        program = torch.compile(_step, **settings).aot_compile(((model, inputs), {}))  # type: ignore[attr-defined]
        program.disable_guard_check()
        place = cache_folder() / "programs"
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        program.save_compiled_function(str(place / key))
    except Exception as error:  # an experimental part of torch, which raises what it likes
        logger.info("what torch compiles is not kept for other processes: %s", error)
        return None
    logger.info("compiled in %.0f s, and kept in %s", time.perf_counter() - begun, place / key)
    return program


def _read(key: str) -> Callable | None:
    try:
        path = cache_folder() / "programs" / key
        if not path.exists() or unsafe(path) is not None:
            return None
        with path.open("rb") as file:
            program: Any = torch.compiler.load_compiled_function(file)
        program.disable_guard_check()
        is_current = all(_source(part.module) == part.content for part in program.source_info().inlined_sources)
    except Exception as error:  # of another version, or damaged: compiled anew
        logger.info("the kept program %s is not read: %s", key, error)
        return None
    return program if is_current else None


@functools.cache
def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def _brief(value: Any) -> Any:
    """What a step is given, but for the values of tensors; a cache by its identity."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    if isinstance(value, Mapping):
        return [(name, _brief(part)) for name, part in value.items()]
    return value if isinstance(value, PLAIN) else id(value)


def _key(model: nn.Module, config: CompileConfig, inputs: dict[str, Any]) -> str:
    seen: dict[int, tuple[int, Any]] = {}
    device = next(model.parameters()).device.type
    settings = (
        (torch.__version__, transformers.__version__, platform.python_version()),
        (instruction_sets.processor(), instruction_sets.in_use(), torch.backends.cpu.get_cpu_capability()),
        (torch.get_num_threads(), torch.get_default_dtype(), float32_precision(), forced_backend()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device)),
        (torch.get_autocast_dtype(device), torch.are_deterministic_algorithms_enabled()),
        _described(config.to_dict(), seen),
        _described([list(hooks.values()) for hooks in GLOBAL_HOOKS], seen),
    )
    modules = [(name, _described_module(module, seen)) for name, module in model.named_modules()]
    return hashlib.sha256(repr((settings, modules, _described(inputs, seen))).encode()).hexdigest()


def _described_module(module: nn.Module, seen: dict[int, tuple[int, Any]]) -> Any:
    own = {name: value for name, value in vars(module).items() if name not in UNREAD | {"_modules"}}
    # hooks have numbers, which count those of the process
    own |= {name: list(value.values()) for name, value in own.items() if "_hooks" in name and isinstance(value, dict)}
    return _name(type(module)), list(module._modules), _described(own, seen)


def _described(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """All of a value that tracing may look at, without addresses; of tensors and objects also which are the same."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, type):
        return _name(value)
    if id(value) in seen:
        return "again", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # kept, so that no other gets its address
    if isinstance(value, torch.Tensor):
        size, switches = (value.shape, value.stride()), (value.requires_grad, value.is_inference())
        return _name(type(value)), value.dtype, size, value.device, switches
    return _name(type(value)), [_described(part, seen) for part in _parts(value)]


def _parts(value: Any) -> Any:
    if isinstance(value, PreTrainedConfig):
        return [item for item in value.to_dict().items() if item[0] != "_name_or_path"]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, nn.Module):
        return ()  # those of the model are described by their names
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return _name(value), value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_consts, value.co_names
    return vars(value) if hasattr(value, "__dict__") else (getattr(value, "__qualname__", repr(type(value))),)


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


CAN_KEEP = os.name == "posix" and hasattr(torch.compiler, "load_compiled_function")
"""Whether this system and this torch can."""
