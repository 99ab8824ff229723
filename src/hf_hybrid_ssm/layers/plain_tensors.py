"""Tensors and sizes as they were asked for, where DeepSpeed partitions parameters (ZeRO-3)."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """In it, `torch.randn(..., dtype=torch.float64)` and the like give that dtype within `deepspeed.zero.Init` too.

    There they give the dtype of the parameters, whatever is asked for, and without a word: initial values that are
    computed in float64 would meet tensors of float32, or be computed in bfloat16. DeepSpeed leaves that context for as
    long as it builds its own engine; this leaves it in the same way.
    """
    zero: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    context = getattr(zero, "top_level_context", None)
    if context is None or not context.patched:  # not begun, or left already
        yield
        return
    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, of which DeepSpeed may have left a part here; that is then a vector, or empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def check_whole(module: torch.nn.Module, name: str) -> None:
    """What reads weights needs whole ones.

    Raises:
        ValueError: DeepSpeed has partitioned them.
    """
    if any(hasattr(parameter, "ds_shape") for parameter in module.parameters()):
        raise ValueError(
            f"{name}: DeepSpeed (ZeRO of stage 3) has left a part of each weight of {type(module).__name__} here, and "
            "whole ones are needed; load it without stage 3."
        )
