"""A linear map whose weight stays in half precision and is multiplied by many rows in float32.

Without instructions for bfloat16 or float16, torch multiplies matrices of them in loops, some five times as slowly as
in float32. One token is bound by reading the weight, for which half precision is right on any processor.
"""

import functools
import math
import platform

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)
MANY_ROWS = 8  # from here on converting the weight costs less than the loops do


@torch.compiler.assume_constant_result
def has_fast_products(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of `dtype` by instructions of its own."""
    return _has_fast_products(dtype)


@functools.cache
def _has_fast_products(dtype: torch.dtype) -> bool:
    if dtype not in HALF:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine() in ("x86_64", "AMD64") and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False  # oneDNN's own answer is the processor's, also where variables keep torch to less
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


class Float32Linear(nn.Linear):
    """`nn.Linear` with a weight in half precision: `y = x Wᵀ + b`, in float32 where `x` has eight rows or more.

    Inputs and outputs are those of `nn.Linear`, `(..., in_features)` to `(..., out_features)`, in the inputs' dtype;
    `y` is rounded once. The weight is converted in each call, so that one map at a time takes twice its memory more.
    With gradients, with autocast, with few rows and on other devices it computes as `nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        gives_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        is_half = self.weight.dtype in HALF and input.dtype == self.weight.dtype
        is_plain = input.device.type == "cpu" and not gives_gradient and not torch.is_autocast_enabled("cpu")
        if not is_half or not is_plain or math.prod(input.shape[:-1]) < MANY_ROWS:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias).to(input.dtype)
