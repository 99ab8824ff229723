"""Programs of compiled decoding that outlive their process.

torch's own cache on disk holds what its backend makes of a graph; the graph itself is traced anew by each process,
which for 30 layers takes most of half a minute. torch can also write down a whole traced and compiled function
(`torch.compile(...).aot_compile`), but binds it to nothing that a model is.
So a program is kept here under a hash of all that tracing looks at (`_described`: of modules, inputs and cache the
classes with their functions, plain attributes, functions by their code and by what they read of their module, and of
tensors all but their values), and the sources that were traced are compared when it is read. What cannot be described
is not kept.

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
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, CompileConfig, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm.models.outputs import CACHE, OLD
from hf_hybrid_ssm.ops.core import instruction_sets
from hf_hybrid_ssm.ops.core.cache_folder import cache_folder, unsafe
from hf_hybrid_ssm.ops.core.constants import constants_of_graphs
from hf_hybrid_ssm.ops.core.dispatch import forced_backend
from hf_hybrid_ssm.ops.core.transforms import float32_precision

logger = logging.getLogger(__name__)

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
UNREAD = {
    *("_compiled_call", "_last_compile_config", "_compiled_modules", "generation_config", "name_or_path"),
    *("_kernel_cache", "_marks"),
}
"""Attributes that no step reads."""
LARGE = {"torch", "accelerate", "peft", "huggingface_hub", *sys.stdlib_module_names}
"""Packages whose classes are described by their names, and functions by their code, without what that reads."""
TRACED = ("models.", "integrations.", "masking_utils", "cache_utils", "activations", "modeling_rope_utils")
"""What of transformers is not."""
MOST = 32
"""Programs that are kept: beyond, those go that have not been read for longest."""
STARTED = time.time()
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
        try:
            key = _key(self.model, self.config, inputs)
        except Exception as error:  # an object that says nothing of itself: of a hook, say
            logger.info("The step is compiled, but not kept for other processes: %s", error)
            return None
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
        with constants_of_graphs():
            program = torch.compile(_step, **settings).aot_compile(((model, inputs), {}))  # type: ignore[attr-defined]
        program.disable_guard_check()
    except Exception as error:  # an experimental part of torch, which raises what it likes
        logger.info("The step is compiled, but not kept for other processes: %s", error)
        return None
    took = f"The step was compiled in {time.perf_counter() - begun:.0f} s, and is"
    try:
        logger.info("%s kept in %s.", took, _write(program, key))
    except Exception as error:
        logger.info("%s not kept for other processes: %s", took, error)
    return program


def _write(program: Any, key: str) -> Path:
    for part in program.source_info().inlined_sources:
        if os.path.getmtime(str(inspect.getsourcefile(importlib.import_module(part.module)))) > STARTED:
            raise ValueError(f"{part.module} was written since this process began")
    place = cache_folder() / "programs"
    for folder in (place.parent, place):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (reason := unsafe(place)) is not None:
        raise ValueError(reason)
    with tempfile.TemporaryDirectory(dir=place) as beside:  # other processes see all of a file or none
        written = Path(beside) / key
        program.save_compiled_function(str(written))
        written.chmod(0o600)
        written.replace(place / key)
    kept = sorted((path for path in place.iterdir() if path.is_file()), key=os.path.getmtime)
    for path in kept[:-MOST]:
        path.unlink(missing_ok=True)
    return place / key


def _read(key: str) -> Callable | None:
    try:
        path = cache_folder() / "programs" / key
        if not path.exists():
            return None
        if (reason := unsafe(path)) is not None:
            raise ValueError(reason)
        os.utime(path)
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
    modules = dict(model.named_modules())
    seen: dict[int, tuple[int, Any]] = {id(module): (n, module) for n, module in enumerate(modules.values())}
    device = next(model.parameters()).device.type
    settings = (
        (torch.__version__, transformers.__version__, platform.python_version()),
        (instruction_sets.processor(), instruction_sets.in_use(), torch.backends.cpu.get_cpu_capability()),
        (torch.get_num_threads(), torch.get_default_dtype(), float32_precision(), forced_backend()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device)),
        (torch.get_autocast_dtype(device), torch.are_deterministic_algorithms_enabled(), torch.get_default_device()),
        _described(config.to_dict(), seen),
        _described([list(hooks.values()) for hooks in GLOBAL_HOOKS], seen),
    )
    found = hashlib.sha256(repr((settings, _described(inputs, seen))).encode())
    for name, module in modules.items():  # one by one: all objects at once would have Python collect garbage
        found.update(repr((name, _described_module(module, seen))).encode())
    return found.hexdigest()


Seen = dict[int, tuple[int, Any]]


def _described_module(module: nn.Module, seen: Seen) -> Any:
    plain = vars(nn.Module())  # most of which is empty, its hooks above all
    own = {name: value for name, value in vars(module).items() if name not in UNREAD}
    own = {name: value for name, value in own.items() if value or name not in plain}
    # hooks have numbers, which count those of the process
    own |= {name: list(value.values()) for name, value in own.items() if "_hooks" in name and isinstance(value, dict)}
    return _described_class(type(module), seen), _described(own, seen)


def _described_class(kind: type, seen: Seen) -> Any:
    """Its name, and its functions: those that replaced others too."""
    if id(kind) in seen:
        return "again", seen[id(kind)][0]
    seen[id(kind)] = len(seen), kind
    own = [base for base in kind.__mro__ if _is_looked_into(base.__module__)]
    parts = [(name, _function_of(value)) for base in own for name, value in vars(base).items()]
    return _name(kind), [(name, _described(value, seen)) for name, value in parts if value is not None]


def _is_looked_into(module: str | None) -> bool:
    package, _, rest = (module or "builtins").partition(".")
    return rest.startswith(TRACED) if package == "transformers" else package not in LARGE


def _function_of(value: Any) -> types.FunctionType | None:
    """The function itself of a property, a method of a class, or a wrapper that caches."""
    for name in ("fget", "func", "__func__", "__wrapped__"):
        if not isinstance(value, types.FunctionType):
            value = getattr(value, name, value)
    return value if isinstance(value, types.FunctionType) else None


def _described(value: Any, seen: Seen) -> Any:
    """All of a value that tracing may look at, without addresses; of tensors and objects also which are the same."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, type):
        return _name(value)
    if isinstance(value, tuple | frozenset):  # constants: which of them are the same is chance
        return _name(type(value)), [_described(part, seen) for part in _parts(value)]
    if id(value) in seen:
        return "again", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # kept, so that no other gets its address
    if isinstance(value, torch.Tensor):
        size, switches = (value.shape, value.stride()), (value.requires_grad, value.is_inference())
        inner = [getattr(value, name) for name in _inner_names(value)]
        return (
            _name(type(value)),
            value.dtype,
            size,
            value.device,
            switches,
            [_described(part, seen) for part in inner],
        )
    if isinstance(value, nn.Module):  # that is not the model's
        return _described_module(value, seen)
    kind = _described_class(type(value), seen) if isinstance(value, Cache | CacheLayerMixin) else _name(type(value))
    return kind, [_described(part, seen) for part in _parts(value)]


def _inner_names(tensor: torch.Tensor) -> list[str]:
    return tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else []


def _parts(value: Any) -> Any:
    if isinstance(value, PreTrainedConfig):
        chosen = str(getattr(value, "_attn_implementation", None)).split("|")[-1]
        fields = [item for item in vars(value).items() if item[0] not in ("_name_or_path", "_commit_hash")]
        return ALL_ATTENTION_FUNCTIONS.get(chosen), *fields
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        what = _described_code(value.__code__)[0]
        return _name(value), what, value.__defaults__, value.__kwdefaults__, cells, _read_by(value)
    if isinstance(value, types.BuiltinFunctionType):
        return (value.__qualname__,)
    if isinstance(value, types.ModuleType):
        return (value.__name__,)
    if isinstance(value, torch._ops.OperatorBase | torch._ops.OpOverloadPacket | types.UnionType | types.GenericAlias):
        return (str(value),)
    if hasattr(value, "__dict__") and not getattr(type(value), "__slots__", ()):
        return vars(value).items()
    return value.__reduce_ex__(2)  # which raises where nothing can be said


@functools.cache
def _described_code(code: types.CodeType) -> tuple[str, tuple[str, ...]]:
    """A hash of what a function does, and the names that it and the functions inside of it read."""
    inner = [_described_code(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    constants = [_described(part, {}) for part in code.co_consts if not isinstance(part, types.CodeType)]
    what = repr((code.co_code, constants, code.co_names, [part for part, _ in inner]))
    names = {*code.co_names, *(name for _, names in inner for name in names)}
    return hashlib.sha256(what.encode()).hexdigest(), tuple(sorted(names))


def _read_by(function: types.FunctionType) -> list[Any]:
    """The constants and functions that it reads of its module, and of modules that it names."""
    if not _is_looked_into(function.__module__):
        return []
    names = _described_code(function.__code__)[1]
    read = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [value for value in read.values() if isinstance(value, types.ModuleType)]:
        read |= {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
    found = [(name, _function_of(value) or value) for name, value in read.items()]
    kinds = (*PLAIN, torch.Tensor, types.FunctionType, tuple, frozenset)
    # what is None may be filled when it is first asked for
    return [(name, value) for name, value in found if isinstance(value, kinds) and value is not None]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


CAN_KEEP = os.name == "posix" and hasattr(torch.compiler, "load_compiled_function")
"""Whether this system and this torch can."""
