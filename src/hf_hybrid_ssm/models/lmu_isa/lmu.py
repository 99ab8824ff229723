"""Implicit self-attention over a Legendre memory (section 3 of the paper)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.implicit_attention import DeferredMemory, defer_updates, implicit_attention
from hf_hybrid_ssm.ops.implicit_attention.decoding import decoder


class ImplicitAttention(nn.Module):
    """Attention among a token's own polynomial coefficients, reduced to q' of them (equations 8 to 11).

    Args:
        order: q.
        reduced_order: q'.
        theta: window of the memory, in tokens.
        activation: of queries, keys and values.
        scale: of the logits.
        bias: a bias for each row of the reductions, and one of the output.
    """

    def __init__(
        self,
        order: int,
        reduced_order: int,
        theta: float,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor],
        scale: float = 1.0,
        bias: bool = True,
    ):
        super().__init__()
        self.theta, self.activation, self.scale = theta, activation, scale
        self.reduce_weight = nn.Parameter(torch.randn(3, reduced_order, order) * order**-0.5)
        self.reduce_bias = nn.Parameter(torch.zeros(3, reduced_order)) if bias else None
        self.collapse_weight = nn.Parameter(torch.randn(reduced_order) * reduced_order**-0.5)
        self.collapse_bias = nn.Parameter(torch.zeros(1)) if bias else None

    def forward(self, x: torch.Tensor, past: States, rows: Rows = PLAIN_ROWS) -> tuple[torch.Tensor, States]:
        """(B, L, D), the states before it → (B, L, D), the states after it."""
        state: torch.Tensor | DeferredMemory | None = past.get("memory")
        if "recent" in past:
            state = DeferredMemory(past["memory"], past["recent"], past["pending"])
        parameters = self._parameters_in(x.dtype)
        y, after = implicit_attention(x, **parameters, activation=self.activation, rows=rows, initial_state=state)
        if isinstance(after, torch.Tensor):
            if decoder(x, self.activation) is None:
                return y, {"memory": after}
            after = defer_updates(after)
        return y, {} if after is None else after._asdict()

    def _parameters_in(self, dtype: torch.dtype) -> dict[str, Any]:
        parameters = (self.reduce_weight, self.reduce_bias, self.collapse_weight, self.collapse_bias)
        weight, bias, collapse, collapse_bias = (None if p is None else p.to(dtype) for p in parameters)
        arrays = {"weight": weight, "bias": bias, "collapse": collapse, "collapse_bias": collapse_bias}
        return {**arrays, "theta": self.theta, "scale": self.scale}
