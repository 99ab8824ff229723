"""Which implementation of an op runs, and why.

An op is a folder of implementations with one meaning: `reference` (the equation, step by step), `torch` (vectorised,
runs everywhere), and, where they pay off, `native` (CPU) and `triton` (CUDA). The first of `PREFERENCE` that can run
is taken. `HF_HYBRID_SSM_BACKEND=torch` or `with backend("torch"):` forces one for every op, `backend="torch"` for one
call; a forced implementation that cannot run raises and says why, it is never replaced silently.
"""

import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_hybrid_ssm.ops.core.self_check import BOUNDS, largest_error
from hf_hybrid_ssm.ops.core.transforms import is_transforming

__all__ = ["BACKENDS", "KERNEL_OF", "PREFERENCE", "REGISTRY", "Op", "backend"]

logger = logging.getLogger(__name__)

BACKENDS = ("triton", "native", "torch", "reference")
PREFERENCE = ("triton", "native", "torch")
KERNEL_OF = {"cuda": "triton", "cpu": "native"}
ENVIRONMENT_VARIABLE = "HF_HYBRID_SSM_BACKEND"
_KEY = "hf_hybrid_ssm_backend"
_LOGGED_REASONS: set[str] = set()
"""Why kernels do not run: a reason shared by several ops is logged once."""


@dataclass
class Op:
    """One op and its implementations.

    Args:
        name: the public name, used in messages.
        builtin: implementations that are plain torch and always importable, by backend name.
        kernels: modules that need an optional package, by backend name. Each has a function named after op and
            backend (`causal_conv_native`) and a function `supports(device_type, dtype) -> str | None`: None if it can
            run, else the reason it cannot. They are imported on first use, so that a missing or broken package never
            breaks the import.
        examples: what implementations take, one value each: on these a kernel is checked against the reference before
            its first use. Kernels take other ways with other sizes, and compilers for cards make other code of rows
            that begin at multiples of 16 bytes, which models have: one of the examples has such rows.
        opaque: names in `builtin` that are more than plain torch operations, and so, like every kernel, cannot run
            inside a function transform.
        differentiable: False for an op of decoding, which overwrites its state and has no gradients to be checked.

    Raises:
        ValueError: there are kernels, but no examples on which to check them.
    """

    name: str
    builtin: dict[str, Callable]
    kernels: dict[str, str] = field(default_factory=dict)
    examples: tuple[Callable[[], Any], ...] = ()
    opaque: tuple[str, ...] = ()
    differentiable: bool = True
    _loaded: dict[str, Any] = field(default_factory=dict, repr=False)
    _supports: dict[str, Callable] = field(default_factory=dict, repr=False)
    _errors: dict[tuple, float | str] = field(default_factory=dict, repr=False)
    _preferred: dict[tuple, str] = field(default_factory=dict, repr=False)
    _warned: set = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        if self.kernels and not self.examples:
            raise ValueError(f"{self.name} has kernels ({', '.join(self.kernels)}) but no examples.")
        REGISTRY[self.name] = self

    def unavailable(self, name: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why backend `name` cannot run this op on such tensors; None if it can."""
        if is_transforming() and (name in self.opaque or name in self.kernels):
            return "it has no rules for forward-mode differentiation and the transforms of torch.func"
        if name in self.builtin:
            return None
        if name not in self.kernels:
            return f"{self.name} has no {name} implementation"
        if name not in self._loaded:
            self._load(name)
        loaded = self._loaded[name]
        if isinstance(loaded, str):
            return loaded
        return self._supports[name](device_type, dtype) or self._failed_check(name, device_type, dtype)

    def self_check(self, name: str, device_type: str, dtype: torch.dtype) -> float | str:
        """The largest relative error of an optional backend that can run here, or what it raised; computed once."""
        key = (name, device_type, dtype)
        if key not in self._errors:
            kernel, reference = self._loaded[name], self.builtin["reference"]
            self._errors[key] = 0.0  # the check itself must not ask for a check
            try:
                options = {"gradients": self.differentiable}
                errors = (largest_error(kernel, reference, e, device_type, dtype, **options) for e in self.examples)
                self._errors[key] = max(errors)
            except Exception as error:  # whatever a kernel does, the torch backend must work
                self._errors[key] = f"{type(error).__name__}: {error}"
            if reason := self._failed_check(name, device_type, dtype):
                logger.warning("%s: the %s backend will not be used: %s.", self.name, name, reason)
        return self._errors[key]

    def _failed_check(self, name: str, device_type: str, dtype: torch.dtype) -> str | None:
        error, where = self.self_check(name, device_type, dtype), f"its self-check on {device_type} in {dtype}"
        if isinstance(error, str):
            return f"{where} raised {error}"
        return (
            None if error <= BOUNDS[dtype] else f"{where} is off by {error:.1e} (at most {BOUNDS[dtype]:.0e} allowed)"
        )

    def _warn_once(self, device_type: str, dtype: torch.dtype) -> None:
        """A missing kernel is not an error, but nobody should have to find out with a stopwatch."""
        kernel = KERNEL_OF.get(device_type)
        if kernel not in self.kernels or dtype not in BOUNDS or kernel in self._warned:
            return
        self._warned.add(kernel)
        if (reason := self.unavailable(kernel, device_type, dtype)) and reason not in _LOGGED_REASONS:
            _LOGGED_REASONS.add(reason)
            message = "%s runs its torch implementation on %s, slower than the %s kernel: %s."
            logger.warning(message, self.name, device_type, kernel, reason)

    def select(self, device_type: str, dtype: torch.dtype, requested: str | None = None) -> Callable:
        """The implementation to run on tensors of this device type and dtype."""
        compiling, transforming = torch.compiler.is_compiling(), is_transforming()
        requested = requested or (_traced.name if compiling else _forced_while_running())
        if requested is None and not transforming and not compiling:
            key = (device_type, dtype)  # asked once: decoding a token asks for every op of every layer
            if key not in self._preferred:
                self._preferred[key] = _choose(self.name, device_type, dtype, None)
            name = self._preferred[key]
        else:
            name = _choose(self.name, device_type, dtype, requested)
        return self.builtin[name] if name in self.builtin else self._loaded[name]

    def explain(self, device_type: str, dtype: torch.dtype) -> dict[str, str]:
        """For each backend "runs", or the reason it cannot run on such tensors."""
        return {name: self.unavailable(name, device_type, dtype) or "runs" for name in BACKENDS}

    def _load(self, name: str) -> None:
        try:
            module = importlib.import_module(self.kernels[name])
            self._supports[name], self._loaded[name] = module.supports, getattr(module, f"{self.name}_{name}")
        except Exception as error:  # a broken optional kernel must not take the torch path down with it
            self._loaded[name] = f"{type(error).__name__} while importing it: {error}"


REGISTRY: dict[str, Op] = {}


@torch.compiler.assume_constant_result
def _choose(op: str, device_type: str, dtype: torch.dtype, requested: str | None) -> str:
    """The name of the backend to run; `torch.compile` calls this once while it traces."""
    name = validate_backend(requested, "backend")
    if name is None:
        order = (*PREFERENCE, "reference")
        name = next(name for name in order if REGISTRY[op].unavailable(name, device_type, dtype) is None)
        if name == "torch" and not is_transforming():
            REGISTRY[op]._warn_once(device_type, dtype)
        return name
    if reason := REGISTRY[op].unavailable(name, device_type, dtype):
        raise ValueError(f"backend={name!r} was forced but cannot run {op}: {reason}.")
    return name


def validate_backend(name: str | None, source: str) -> str | None:
    """`name`, if it is None or one of `BACKENDS`.

    Raises:
        ValueError: it is neither.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{source}={name!r} is not a backend; choose one of {', '.join(BACKENDS)}.")
    return name


_ENVIRONMENT_BACKEND = validate_backend(os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE)
_forced: ContextVar[str | None] = ContextVar(_KEY)


class _Traced(threading.local):
    """The same for `torch.compile`, which cannot trace a context variable, but guards on what is local to a thread."""

    name = _ENVIRONMENT_BACKEND


_traced = _Traced()


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force every op inside the `with` block to the backend `name` (one of `BACKENDS`; None lifts the force).

    It holds in this thread (and task of asyncio) and in the backward passes started there, and nowhere else; the
    environment variable HF_HYBRID_SSM_BACKEND holds everywhere.
    """
    validate_backend(name, "backend")
    if torch.compiler.is_compiling():
        previous, _traced.name = _traced.name, name
        try:
            yield
        finally:
            _traced.name = previous
        return
    token = _forced.set(name)
    _set_backend_of_thread(name)
    try:
        yield
    finally:
        _forced.reset(token)
        _set_backend_of_thread(_forced.get(_ENVIRONMENT_BACKEND))


def _set_backend_of_thread(name: str | None) -> None:
    """Tell what cannot read the context variable: traces, and autograd's own threads, which get torch's thread-local
    objects from the thread that called backward (a checkpoint there runs the forward again)."""
    _traced.name = name
    torch._C._stash_obj_in_tls(_KEY, name)


def forced_backend() -> str | None:
    """The name of the backend forced here, or None."""
    return _traced.name if torch.compiler.is_compiling() else _forced_while_running()


def _forced_while_running() -> str | None:
    """The same where nothing is traced."""
    if torch._C._current_graph_task_id() != -1 and torch._C._is_key_in_tls(_KEY):
        return _forced.get(torch._C._get_obj_in_tls(_KEY))
    return _forced.get(_ENVIRONMENT_BACKEND)
