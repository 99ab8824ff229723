"""What the bindings of the C kernels share: when they run, and the form of their arguments.

Without a compiler there is no native backend, and the torch backend runs instead.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_hybrid_ssm.ops.core.custom_ops import is_plain_call, step_op
from hf_hybrid_ssm.ops.core.native_build import compile_and_load, missing_compiler

__all__ = [
    "contiguous",
    "is_plain_call",
    "library_beside",
    "missing_compiler",
    "prepared",
    "step_op",
    "supports",
    "with_dense_rows",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a C kernel of this package can run on such tensors, else the reason it cannot."""
    if device_type != "cpu":
        return f"it runs on the CPU, not on {device_type}"
    if dtype not in DTYPES:
        return f"it computes in float32, which is too coarse for {dtype}"
    return missing_compiler()


MaybeTensor = TypeVar("MaybeTensor", torch.Tensor, torch.Tensor | None)


def contiguous(tensor: MaybeTensor, dtype: torch.dtype) -> MaybeTensor:
    """Contiguous, in that dtype."""
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


def prepared(tensor: MaybeTensor) -> MaybeTensor:
    """In the form that C takes: contiguous float32."""
    if tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous()):  # each decoded token comes here
        return tensor
    return contiguous(tensor, torch.float32)


def with_dense_rows(*tensors: torch.Tensor | None) -> list[Any]:
    """Each in float32 with a dense last dimension; the others may lie apart."""
    return [
        x if x is None or (x.dtype == torch.float32 and x.stride(-1) == 1) else _with_dense_rows(x) for x in tensors
    ]


def _with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.float()  # first: a conversion may order the numbers anew
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def library_beside(module: str) -> Callable[[], ctypes.CDLL]:
    """What gives the library of the C file beside a module (its `__file__`), compiled when first asked for."""
    return cache(lambda: compile_and_load(Path(module).with_suffix(".c")))
