"""What a student's parts are worth: judge it without its memory, without its attention, or with its memory emptied.

A student that has windows beside a memory may ignore the memory, and neither its loss nor short tasks show it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.ops.local_attention import AttentionState
from hf_hybrid_ssm.students.attention import OF_WINDOW
from hf_hybrid_ssm.students.memory import ContextMemory, MemoryInstead
from hf_hybrid_ssm.students.sinks import FIRST
from hf_hybrid_ssm.students.teacher import attention_layers

PARTS = ("memory", "attention")


@contextmanager
def without_part(student: Any, part: str) -> Iterator[None]:
    """Within it, a part of the student's layers adds nothing; its states are kept as before.

    Args:
        part: "memory" (what is left are windows and the layers that keep their attention), or "attention" (to tokens,
            of windows or of all).

    Raises:
        ValueError: no such part, or no layer has it.
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r} must be one of {', '.join(map(repr, PARTS))}.")
    silenced = []
    for layer in attention_layers(student.config, student.config.teacher_type).values():
        module = student.base_model.get_submodule(layer.name)
        if part == "memory" and (memory := getattr(module, "memory", None)) is not None:
            silenced.append(memory.o_proj if isinstance(memory, ContextMemory) else memory.out_proj)
        if part == "attention" and not isinstance(module, MemoryInstead):
            silenced.append(module)
    if not silenced:
        raise ValueError(f"part={part!r}: no layer of this student has it.")
    with ExitStack() as hooks:
        for module in silenced:  # of attention before a memory's output is added
            hooks.enter_context(module.register_forward_hook(silent, prepend=True))
        yield


def silent(module: Any, inputs: Any, output: Any) -> Any:
    """A forward hook: the module adds nothing."""
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def zero_memory(cache: Cache) -> None:
    """Empty the memory that a cache holds, in place: the states of mixers and context states.

    The keys and values of windows stay, and so do those of layers that keep their attention.

    Raises:
        ValueError: it holds no such state.
    """
    layers = [layer for layer in cache.layers if is_recurrent_state_layer(layer)]
    attended = {prefix + name for prefix in ("", OF_WINDOW) for name in (*AttentionState._fields, *FIRST)}
    if not any(layer.states.keys() - attended for layer in layers):
        raise ValueError("the cache holds no memory: fill it by a forward of a student that has one.")
    for layer in layers:
        for name in layer.states.keys() - attended:
            state = layer.states[name]  # those of a static cache keep their addresses
            layer.states[name] = state.zero_() if layer.is_compileable else torch.zeros_like(state)
        layer.history.clear()
