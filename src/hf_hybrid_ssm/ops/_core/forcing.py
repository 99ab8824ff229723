"""Which backend the user has forced."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

BACKENDS = ("triton", "native", "torch", "reference")
ENVIRONMENT_VARIABLE = "HF_HYBRID_SSM_BACKEND"
_KEY = "hf_hybrid_ssm_backend"


def validate_backend(name: str | None, source: str) -> str | None:
    """`name`, if it is None or one of `BACKENDS`.

    Raises:
        ValueError: it is neither.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{source}={name!r} is not a backend; choose one of {', '.join(BACKENDS)}.")
    return name


_EVERYWHERE = validate_backend(os.environ.get(ENVIRONMENT_VARIABLE) or None, ENVIRONMENT_VARIABLE)
_forced: ContextVar[str | None] = ContextVar(_KEY)


class _Traced(threading.local):
    """The same for `torch.compile`, which cannot trace a context variable, but guards on what is local to a thread."""

    name = _EVERYWHERE


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
    _publish(name)
    try:
        yield
    finally:
        _forced.reset(token)
        _publish(_forced.get(_EVERYWHERE))


def _publish(name: str | None) -> None:
    """Tell what cannot read the context variable: traces, and autograd's own threads, which get torch's thread-local
    objects from the thread that called backward (a checkpoint there runs the forward again)."""
    _traced.name = name
    torch._C._stash_obj_in_tls(_KEY, name)


def forced_backend() -> str | None:
    """The name of the backend forced here, or None."""
    if torch.compiler.is_compiling():
        return _traced.name
    if torch._C._current_graph_task_id() != -1 and torch._C._is_key_in_tls(_KEY):
        return _forced.get(torch._C._get_obj_in_tls(_KEY))
    return _forced.get(_EVERYWHERE)
