"""What only the paper's models of the Long Range Arena have: MEGA's norms, and pixels as tokens."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init


class ScaleNorm(nn.Module):
    """One learned scalar times x / rms(x)."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.eps = eps

    def set_initial_values(self) -> None:
        init.ones_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale


class TimeBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, L, D) over batch and time: over the tokens that are not padding.

    Each batch updates the running statistics once, also where gradient checkpointing recomputes the forward.
    """

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, L, D) → the same; `token_mask` (B, L) bool, the tokens that count; None: all."""
        repeats = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # within a backward
        if not self.training or (token_mask is None and not repeats):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)
        if token_mask is None:  # the same operation, whose statistics are dropped
            assert self.running_mean is not None and self.running_var is not None
            mean, variance = self.running_mean.clone(), self.running_var.clone()
            y = F.batch_norm(x.transpose(1, 2), mean, variance, self.weight, self.bias, training=True, eps=self.eps)
            return y.transpose(1, 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        counts = token_mask.unsqueeze(-1).to(wide.dtype)
        count = counts.sum().clamp(min=1)
        mean = (wide * counts).sum((0, 1)) / count
        variance = ((wide - mean).square() * counts).sum((0, 1)) / count
        if not repeats:
            self._update_statistics(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        normalised = (wide - mean) * torch.rsqrt(variance + self.eps)
        return (normalised * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics towards those of a batch, as torch does."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), self.momentum)


class PixelEmbedding(nn.Linear):
    """Grey values 0 … 255 as tokens, normalised and mapped linearly to the width."""

    def __init__(self, hidden_size: int, mean: float, std: float):
        super().__init__(1, hidden_size)
        self.mean, self.std = mean, std

    def set_initial_values(self) -> None:
        """As MEGA's."""
        init.normal_(self.weight, std=1.0)
        init.normal_(self.bias, std=0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(((input_ids / 255 - self.mean) / self.std).unsqueeze(-1).to(self.weight.dtype))
