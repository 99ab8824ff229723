"""Compiled decoding on a CPU: the settings with which `generate` of transformers compiles its step once."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import CompileConfig

INSIDE = "._modules["
HAS_FILTERS = hasattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")  # torch 2.8


def compiled_decoding(**options: Any) -> CompileConfig:
    """What `generate` is given to compile the step that writes a token, on a CPU too::

        model.generate(**inputs, cache_implementation="static", max_cache_len=4096, compile_config=compiled_decoding())

    The prompt is read as always. The first token that this model writes takes as long as compiling does, a minute or
    two for 30 layers; later calls of `generate` with the same batch size and `max_cache_len` find it compiled. torch
    keeps what it made on disk (TORCHINDUCTOR_CACHE_DIR), so another process only traces the model again.

    A step looks at its inputs, the cache, and whether the model trains and in which dtype, not at every module before
    every token: after a change of modules, hooks or adapters call `torch.compiler.reset()`. Weights may change.

    Args:
        options: of torch's inductor backend, such as `max_autotune=True`.

    Returns:
        A new configuration, for calls of `generate`; it is not saved with a model.
    """
    if HAS_FILTERS:
        options = {"guard_filter_fn": outside_of_modules} | options
    config = CompileConfig(fullgraph=True, dynamic=False, mode=None, options=options)
    config._compile_all_devices = True  # transformers compiles for accelerators alone
    return config


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
