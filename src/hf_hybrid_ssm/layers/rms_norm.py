"""Root-mean-square normalisation that computes in float32 whatever the input."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 or wider; the output has the weight's
    dtype."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype == torch.float32:  # a cast to the same dtype costs a call, and there are many
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps).to(self.weight.dtype)
