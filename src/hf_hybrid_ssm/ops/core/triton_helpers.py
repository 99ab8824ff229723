"""What the Triton kernels and their launches share.

Kernels run on CUDA devices, or on any device when Triton interprets them in Python.
"""

import inspect
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

# read once, as `triton.jit` does when it wraps a kernel
INTERPRETING = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOWEST = (3, 6)  # of the versions that `python -m tests.reporting triton` compiles the kernels with
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


# what changes from call to call with the length and the batch; `lane` is what the compiler must not know
VARYING = frozenset({
    "L", "T", "W", "FIRST", "input_channels", "filters", "padded", "tiles", "parts", "rows", "num_rows", "num_splits",
    "num_blocks", "num_tiles", "blocks_per_split", "blocks", "chunks", "per_segment", "segments", "warm", "lane",
})  # fmt: skip


def kernel(function: Callable) -> Any:
    """`triton.jit`, which compiles a kernel anew where an argument becomes 1 or a multiple of 16, but for those of
    `VARYING`: no address is aligned by them, and a large kernel takes half a minute."""
    names = inspect.signature(function).parameters
    left_out = [name for name in names if name in VARYING and function.__annotations__.get(name) is not tl.constexpr]
    return triton.jit(function, do_not_specialize=left_out)


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a Triton kernel can run on such tensors, else the reason it cannot."""
    if device_type == "cuda" and torch.version.hip is not None:
        return "the Triton kernels hold NVIDIA's assembly, and this torch is AMD's (ROCm)"
    if VERSION < LOWEST:
        return f"Triton {triton.__version__} is too old: pip install 'triton>={'.'.join(map(str, LOWEST))}'"
    if dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 and float16, not {dtype}"
    if device_type != "cuda" and not INTERPRETING.value:
        return f"the Triton kernels run on CUDA devices, not on {device_type}"
    return None


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current device: Triton launches on the current device, whatever its arguments say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def multiprocessors(device: torch.device) -> int:
    """How many the device has; where Triton interprets, one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_FITTING: dict[Hashable, int] = {}


def first_that_fits(key: Hashable, attempts: Sequence[Any], launch: Callable[[Any], Any]) -> Any:
    """What `launch` returns of the first attempt whose programs find room on the device.

    Triton compares what a compiled program shares with what the device has, before anything runs. Which attempt fits
    is remembered.

    Args:
        key: of launches that compile to the same programs on the same device.
        attempts: sizes, those that need the least shared memory last.

    Raises:
        triton.runtime.errors.OutOfResources: not even the last one fits.
    """
    for number in range(_FITTING.get(key, 0), len(attempts)):
        try:
            result = launch(attempts[number])
        except OutOfResources:
            if number + 1 == len(attempts):
                raise
            continue
        _FITTING[key] = number
        return result
    raise ValueError(f"attempts={attempts!r} must hold at least one.")


def dense_rows(*tensors: Tensor | None) -> list:
    """For kernels that follow any row and time stride: only the last axis must be dense."""
    dense = list(tensors)
    for i, t in enumerate(tensors):  # steps come here: a comprehension would be another call of Python
        if t is not None and t.stride(-1) != 1:
            dense[i] = t.contiguous()
    return dense


def contiguous(*tensors: Tensor | None) -> list:
    """For kernels that follow no strides."""
    dense = list(tensors)
    for i, t in enumerate(tensors):
        if t is not None:
            dense[i] = t.contiguous()
    return dense


def strides(*tensors: Tensor | None) -> list[int]:
    """Row and time strides of each; zeros for None."""
    return [stride for t in tensors for stride in ((0, 0) if t is None else t.stride()[:2])]


@triton.jit
def load(pointers, mask):
    """In float32, 0 where there is nothing to be read."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def tokens_at(signal, row, first, t, d, real):
    """Tokens first + t [T, 1] of channels d [BD] of a row of `signal`: a pointer, its strides of rows and tokens."""
    return load(signal[0] + row * signal[1] + first * signal[2] + (t * signal[2] + d[None, :]), real)


@triton.jit
def exponential(x):
    """exp(x) of float32 in two instructions; what is below 1e-38 becomes 0."""
    if INTERPRETING:
        return tl.exp(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """1 / x of float32 in one instruction, off by one unit in the last place; 0 where x is above 8e37."""
    if INTERPRETING:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def select_row(tile, index, i):
    """Row i of a tile; the compiler folds it away where the first axis lies in a lane's registers."""
    bits = tl.where(index == i, tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def program_coords(program, tiles, num_splits):
    """Which channels, split and row a program has; one axis of the grid, so that none is too short."""
    rest = program // tiles
    return program % tiles, rest % num_splits, (rest // num_splits).to(tl.int64)
