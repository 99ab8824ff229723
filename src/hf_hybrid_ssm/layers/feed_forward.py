"""The position-wise feed-forward layer, (B, L, hidden_size) → (B, L, hidden_size)."""

from collections.abc import Callable

import torch
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
