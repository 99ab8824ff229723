"""Where Triton kernels can run: CUDA devices, or any device when Triton interprets its kernels in Python."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

INTERPRETING = bool(triton.knobs.runtime.interpret)  # read once, as `triton.jit` does when it wraps a kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LANES_PER_MULTIPROCESSOR = 8 * 32  # eight warps hide the latency of the loads of a scan


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if a Triton kernel can run on such tensors, else the reason it cannot."""
    if dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 and float16, not {dtype}"
    if device_type != "cuda" and not INTERPRETING:
        return f"the Triton kernels run on CUDA devices, not on {device_type}"
    return None


def device_guard(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's card the current one: Triton launches on the current device, whatever its arguments say."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def target_threads(device: torch.device) -> int:
    """How many threads keep the device busy."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count * LANES_PER_MULTIPROCESSOR
