"""Position-wise feed-forward layers, (B, L, hidden_size) → (B, L, hidden_size)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


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
    """down(silu(gate(x)) · up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
