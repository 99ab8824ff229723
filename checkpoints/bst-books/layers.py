# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: f472586762882e135971c832f1dbe34e777cb5807b2c804e0e05a442d826dc0d

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .dispatch import is_transforming
from .mixers import table


# ---- layers/feed_forward.py -----------------------------------------------------------------------------------------
# Position-wise feed-forward layers, (B, L, hidden_size) → (B, L, hidden_size).

class FeedForward(nn.Module):
    """W_2 dropout(activation(W_1 x + b_1)) + b_2."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.fc2 = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.fc1(x))
        return self.fc2(x if self.dropout is None else self.dropout(x))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases; `activation` may take the place of silu."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: Callable[[torch.Tensor], torch.Tensor] = F.silu
    ):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


# ---- layers/rms_norm.py ---------------------------------------------------------------------------------------------
# Root-mean-square normalisation that computes in float32 whatever the input.

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


# ---- layers/l2_normalise.py -----------------------------------------------------------------------------------------
# Vectors of length 1.

EPSILON = 1e-6


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) over the last dimension, in float32 or wider."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if torch.compiler.is_compiling() or is_transforming() or not wide.requires_grad:
        return _normalise(wide)[0].to(x.dtype)
    return _L2Normalise.apply(wide).to(x.dtype)


def _normalise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x / h and h."""
    length = (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()
    return x / length, length


class _L2Normalise(torch.autograd.Function):
    """With y = x / h: dx = (dy - y (y·dy)) / h, half of the operations that autograd would make of the equation."""

    @staticmethod
    def forward(ctx: Any, x):
        y, length = _normalise(x)
        ctx.save_for_backward(x, y, length)
        return y

    @staticmethod
    def backward(ctx: Any, grad):
        x, y, length = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is to be differentiated too
            y, length = _normalise(x)
        return torch.addcmul(grad, y, (grad * y).sum(-1, keepdim=True), value=-1) / length


# ---- layers/relative_bias.py ----------------------------------------------------------------------------------------
# T5's relative position bias: a learned number for each head and bucket of distances.

def distance_buckets(num_buckets: int, max_distance: int, count: int) -> tuple[int, ...]:
    """The bucket of the distances 0 … count - 1 on one side.

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`; all beyond share
    the last one (T5, `_relative_position_bucket`).
    """
    exact = num_buckets // 2

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        share = math.log(distance / exact) / math.log(max_distance / exact)
        return min(exact + int(share * (num_buckets - exact)), num_buckets - 1)

    return tuple(bucket(distance) for distance in range(count))


def two_sided_buckets(num_buckets: int, max_distance: int, count: int) -> tuple[int, ...]:
    """The same for the distances 1 - count … count - 1; tokens ahead have the later half of the buckets."""
    half = num_buckets // 2
    back = distance_buckets(half, max_distance, count)
    return (*(half + bucket for bucket in reversed(back[1:])), *back)


_CAUSAL, _TWO_SIDED = table(distance_buckets), table(two_sided_buckets)


class RelativeBias(nn.Embedding):
    """Bias by distance, in the form `ops.local_attention` takes.

    Args:
        num_heads: H.
        num_buckets: rows of the table; two-sided attention uses one half for each side.
        max_distance: from here on all distances share a bucket.
        bidirectional: distances of both signs.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = False):
        super().__init__(num_buckets, num_heads)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self, left: int | None) -> torch.Tensor:  # type: ignore[override]
        """(H, R): column c is distance c; two-sided, the middle column is 0 and later ones look back.

        Args:
            left: the greatest distance to be asked for; None for all. Distances beyond the table share its ends.
        """
        count = self.max_distance + 1 if left is None else min(left, self.max_distance) + 1
        buckets = _TWO_SIDED if self.bidirectional else _CAUSAL
        columns = buckets(self.num_embeddings, self.max_distance, count, device=self.weight.device)
        return F.embedding(columns, self.weight).T
