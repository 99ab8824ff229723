"""What a student's parts are worth: judge it without its memory, without its attention, or with its memory emptied.

A student that has windows beside a memory may ignore the memory, and neither its loss nor short tasks show it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache

from hf_hybrid_ssm.models.bst.modeling_bst import BstForCausalLM
from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.longhorn.attention_longhorn import OF_WINDOW
from hf_hybrid_ssm.ops.local_attention import AttentionState
from hf_hybrid_ssm.upcycle.student import Student

PARTS = ("memory", "attention")


@contextmanager
def without_part(student: Student, part: str) -> Iterator[None]:
    """Within it, a part of the student's layers adds nothing; its states are kept as before.

    Args:
        part: "memory" (mixers, context states, recurrent states: what is left are windows and the layers that keep
            their attention), or "attention" (to tokens, of windows or of all).

    Raises:
        ValueError: no such part, or no layer has it.
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r} must be one of {', '.join(map(repr, PARTS))}.")
    silence = _silence_in_bst if isinstance(student, BstForCausalLM) else _silence_in_longhorn
    hooks = [hook for layer in student.model.layers for hook in silence(layer, part)]
    if not hooks:
        raise ValueError(f"part={part!r}: no layer of this student has it.")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _silence_in_longhorn(layer: Any, part: str) -> Iterator[Any]:
    module, output = ("mixer", "out_proj") if part == "memory" else ("self_attn", "o_proj")
    if hasattr(layer, module):
        projection = getattr(getattr(layer, module), output)
        yield projection.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))


def _silence_in_bst(layer: Any, part: str) -> Iterator[Any]:
    """Attention and memory are halves of one projection's input; the bias that they share stays."""
    attention = layer.attention
    of_tokens = attention.q_proj.out_features
    shut = slice(of_tokens, None) if part == "memory" else slice(of_tokens)

    def silent(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        heard = inputs[0].clone()
        heard[..., shut] = 0
        return (heard, *inputs[1:])

    if part == "attention" or attention.o_proj.in_features > of_tokens:
        yield attention.o_proj.register_forward_pre_hook(silent)


def zero_memory(cache: Cache) -> None:
    """Empty the memory that a cache holds, in place: the states of mixers, context states and recurrent states.

    The keys and values of windows stay, and so do those of layers that keep their attention.

    Raises:
        ValueError: it holds no such state.
    """
    layers = [layer for layer in cache.layers if is_recurrent_state_layer(layer)]
    attended = {*AttentionState._fields, *(OF_WINDOW + name for name in AttentionState._fields)}
    if not any(layer.states.keys() - attended for layer in layers):
        raise ValueError("the cache holds no memory: fill it by a forward of a student that has one.")
    for layer in layers:
        layer.zero_states(keep=attended)
