"""What the Triton kernels and their launches share.

Kernels run on CUDA devices, or on any device when Triton interprets them in Python.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETING = bool(triton.knobs.runtime.interpret)  # read once, as `triton.jit` does when it wraps a kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
THREADS_PER_MULTIPROCESSOR = 8 * 32  # eight warps hide the latency of the loads of a scan


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a Triton kernel can run on such tensors, else the reason it cannot."""
    if dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 and float16, not {dtype}"
    if device_type != "cuda" and not INTERPRETING:
        return f"the Triton kernels run on CUDA devices, not on {device_type}"
    return None


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current device: Triton launches on the current device, whatever its arguments say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def target_threads(device: torch.device) -> int:
    """How many threads keep the device busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * THREADS_PER_MULTIPROCESSOR


def dense_rows(*tensors: Tensor | None) -> list:
    """For kernels that follow any row and time stride: only the last axis must be dense."""
    return [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tensors]


def contiguous(*tensors: Tensor | None) -> list:
    """For kernels that follow no strides."""
    return [None if t is None else t.contiguous() for t in tensors]


def strides(*tensors: Tensor | None) -> list[int]:
    """Row and time strides of each; zeros for None."""
    return [stride for t in tensors for stride in ((0, 0) if t is None else t.stride()[:2])]


@triton.jit
def load(pointers, mask):
    """In float32, 0 where there is nothing to be read."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
