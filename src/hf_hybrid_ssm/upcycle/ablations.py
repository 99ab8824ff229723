"""What a student's parts are worth: judge it without its memory, without its attention, or with its memory emptied.

A student that has windows beside a memory may ignore the memory, and neither its loss nor short tasks show it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
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
    hooks: list[Any] = []
    for layer in attention_layers(student.config, student.config.teacher_type).values():
        module = student.base_model.get_submodule(layer.name)
        if part == "memory" and (memory := getattr(module, "memory", None)) is not None:
            output = memory.o_proj if isinstance(memory, ContextMemory) else memory.out_proj
            hooks.append(output.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output)))
        if part == "attention" and not isinstance(module, MemoryInstead):  # before a memory's output is added
            hooks.append(module.register_forward_hook(_silent, prepend=True))
    if not hooks:
        raise ValueError(f"part={part!r}: no layer of this student has it.")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _silent(module: Any, inputs: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:])


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
        layer.zero_states(keep=attended)
