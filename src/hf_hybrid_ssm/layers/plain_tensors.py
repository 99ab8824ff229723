"""Tensors as they were asked for, where DeepSpeed partitions parameters while a model is built."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """In it, `torch.randn(..., dtype=torch.float64)` and the like give that dtype within `deepspeed.zero.Init` too.

    There they give the dtype of the parameters, whatever is asked for, and without a word: initial values that are
    computed in float64 would meet tensors of float32, or be computed in bfloat16. DeepSpeed leaves that context for as
    long as it builds its own engine; this leaves it in the same way.
    """
    zero: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is None:
        yield
        return
    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()
