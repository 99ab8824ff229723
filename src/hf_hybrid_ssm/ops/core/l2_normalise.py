"""L2 normalisation, and queries that are scaled by it."""

from typing import Any

import torch

from hf_hybrid_ssm.ops.core.transforms import is_transforming

EPSILON = 1e-6


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) over the last dimension, in float32 or wider."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if torch.compiler.is_compiling() or is_transforming() or not wide.requires_grad:
        return _normalise(wide)[0].to(x.dtype)
    return _L2Normalise.apply(wide).to(x.dtype)


def scaled_queries(queries: torch.Tensor, head_scale: torch.Tensor | None) -> torch.Tensor:
    """Queries (B, L, H, e), L2-normalised and times |head_scale| (H,), or without it times e**-0.5."""
    if head_scale is None:
        return queries * queries.shape[-1] ** -0.5
    return l2_normalise(queries) * head_scale.abs().to(queries.dtype).unsqueeze(1)


def _normalise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / h and h."""
    length = (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
    return x / length, length


class _L2Normalise(torch.autograd.Function):
    """With y = x / h: dx = (dy - y (y·dy)) / h, half of the operations that autograd would make of the equation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y, length = _normalise(x)
        ctx.save_for_backward(x, y, length)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, y, length = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is to be differentiated too
            y, length = _normalise(x)
        return torch.addcmul(grad, y, (grad * y).sum(-1, keepdim=True), value=-1) / length
