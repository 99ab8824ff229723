"""Root-mean-square normalisation that computes in float32 whatever the input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_hybrid_ssm.ops.core.transforms import is_transforming


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 or wider; the output has the weight's
    dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)  # decoding makes this call often
        dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        wide, weight = x.to(dtype), self.weight.to(dtype)
        if _has_no_fused_kernel(wide, self.weight):
            return _RMSNorm.apply(wide, weight, self.eps).to(self.weight.dtype)
        return F.rms_norm(wide, self.normalized_shape, weight, self.eps).to(self.weight.dtype)


def _has_no_fused_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch would train this norm operation by operation: on a CPU, as it is and without a compiler.

    Fake tensors count as what they stand for: a plan must see what a training step keeps. Other subclasses do not.
    """
    if torch.compiler.is_compiling() or is_transforming() or x.device.type != "cpu":
        return False
    is_plain = type(x) in (torch.Tensor, FakeTensor) and type(weight) in (nn.Parameter, FakeTensor)
    return is_plain and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


class _RMSNorm(torch.autograd.Function):
    """With n = x / sqrt(mean(x²) + eps): dx = (w dy - n mean(n · w dy)) / sqrt(mean(x²) + eps)."""

    @staticmethod
    def forward(ctx: Any, x, weight, eps):
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad):
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is to be differentiated too
            scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        n = x * scale
        of_weight = (grad * n).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None
        grad = grad * weight
        shift = (grad * n).mean(-1, keepdim=True)
        return torch.addcmul(grad, n, shift, value=-1) * scale, of_weight, None
