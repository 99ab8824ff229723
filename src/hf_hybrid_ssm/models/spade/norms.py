"""Normalisations by name, as the encoder of the Long Range Arena needs them."""

import torch
from torch import nn


class ScaleNorm(nn.Module):
    """One learned scalar times x / rms(x)."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale


class TimeBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, L, D) over batch and time; for inputs without padding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


NORMS = ("layernorm", "scalenorm", "batchnorm")


def build_norm(name: str, hidden_size: int, eps: float) -> nn.Module:
    """The normalisation called `name` (one of `NORMS`) for (B, L, hidden_size)."""
    if name == "layernorm":
        return nn.LayerNorm(hidden_size, eps=eps)
    if name == "scalenorm":
        return ScaleNorm(eps)
    if name == "batchnorm":
        return TimeBatchNorm(hidden_size, eps=eps)
    raise ValueError(f"There is no norm {name!r}; choose one of {', '.join(NORMS)}.")
