"""Which implementation of an op runs, and why.

An op is a folder of implementations with one meaning: `reference` (the equation, step by step), `torch` (vectorised,
runs everywhere), and, where they pay, `native` (CPU) and `triton` (CUDA). The first of `PREFERENCE` that can run is
taken. `HF_HYBRID_SSM_BACKEND=torch` or `with ops.backend("torch"):` forces one for every op, `backend="torch"` for one
call; a forced implementation that cannot run raises and says why, it is never replaced silently.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)

PREFERENCE = ("triton", "native", "torch")
BACKENDS = (*PREFERENCE, "reference")
ENVIRONMENT_VARIABLE = "HF_HYBRID_SSM_BACKEND"


def _checked_name(name: str | None, source: str) -> str | None:
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{source}={name!r} is not a backend; choose one of {', '.join(BACKENDS)}.")
    return name


_forced: str | None = _checked_name(os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE)


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Force every op inside the `with` block to the backend `name` (one of `BACKENDS`; None lifts the force)."""
    global _forced
    previous, _forced = _forced, _checked_name(name, "backend")
    try:
        yield
    finally:
        _forced = previous


@dataclass
class Op:
    """One op and its implementations.

    Args:
        name: the public name, used in messages.
        run: implementations that are plain torch and always importable, by backend name.
        optional: modules that need an optional package, by backend name. Each has a function `run` of the same
            signature and a function `supports(device_type, dtype) -> str | None`: None if it can run, else the reason
            it cannot. They are imported on first use, so that a missing or broken package costs time, not the import.
    """

    name: str
    run: dict[str, Callable]
    optional: dict[str, str] = field(default_factory=dict)
    _loaded: dict[str, Callable | str] = field(default_factory=dict, repr=False)
    _supports: dict[str, Callable] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        REGISTRY[self.name] = self

    def unavailable(self, name: str, device_type: str, dtype: torch.dtype) -> str | None:
        """Why backend `name` cannot run this op on such tensors; None if it can."""
        if name in self.run:
            return None
        if name not in self.optional:
            return f"{self.name} has no {name} implementation"
        if name not in self._loaded:
            self._load(name)
        loaded = self._loaded[name]
        return loaded if isinstance(loaded, str) else self._supports[name](device_type, dtype)

    def select(self, device_type: str, dtype: torch.dtype, requested: str | None = None) -> Callable:
        """The implementation to run on tensors of this device type and dtype."""
        name = _choose(self.name, device_type, dtype, requested or _forced)
        return self.run[name] if name in self.run else self._loaded[name]  # type: ignore[return-value]

    def explain(self, device_type: str, dtype: torch.dtype) -> dict[str, str]:
        """What each backend would say to such tensors: "runs" or the reason it does not."""
        return {name: self.unavailable(name, device_type, dtype) or "runs" for name in BACKENDS}

    def _load(self, name: str) -> None:
        try:
            module = importlib.import_module(self.optional[name])
        except Exception as error:  # a broken optional kernel must not take the torch path down with it
            self._loaded[name] = f"{type(error).__name__} while importing it: {error}"
            if not isinstance(error, ModuleNotFoundError):
                logger.warning("%s: the %s backend is broken and will not be used (%s).", self.name, name, error)
        else:
            self._supports[name] = module.supports
            self._loaded[name] = module.run


REGISTRY: dict[str, Op] = {}


@torch.compiler.assume_constant_result
def _choose(op: str, device_type: str, dtype: torch.dtype, requested: str | None) -> str:
    """The name of the backend to run; `torch.compile` calls this once while it traces."""
    name = _checked_name(requested, "backend")
    if name is None:
        return next(name for name in PREFERENCE if REGISTRY[op].unavailable(name, device_type, dtype) is None)
    if reason := REGISTRY[op].unavailable(name, device_type, dtype):
        raise ValueError(f"backend={name!r} was forced but cannot run {op}: {reason}.")
    return name
