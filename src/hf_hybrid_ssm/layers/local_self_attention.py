"""Causal or two-sided self-attention within a window, with its projections and its state."""

import torch
from torch import nn

from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.ops.core.pages import ServedKeys
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Limits, Window, local_attention


class LocalSelfAttention(nn.Module):
    """Multi-head `local_attention` of maps of one input.

    Args:
        hidden_size: d.
        num_heads: H, of size d / H.
        window, chunk_size: the keys a token sees, as `local_attention` takes them.
        bias: biases in the four maps.
        dropout: on the attention weights.
        relative_bias: a bias by distance of its own.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        window: Window | Limits,
        chunk_size: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        relative_bias: RelativeBias | None = None,
    ):
        super().__init__()
        self.num_heads, self.window, self.chunk_size = num_heads, Window.of(window), chunk_size
        self.dropout = nn.Dropout(dropout)  # a module, as what turns dropout off looks for
        sizes = (hidden_size, hidden_size, bias)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(*sizes) for _ in range(4))
        self.relative_bias = relative_bias

    def forward(
        self,
        x: torch.Tensor,
        past: dict[str, torch.Tensor],
        rows: Rows = PLAIN_ROWS,
        *,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(B, L, d), the states before it → (B, L, d), the states after it.

        Args:
            past: has the fields of `AttentionState` by name, or is empty. `keys` may be `ServedKeys` where the window
                is (None, 0).
            rows, bias: as of `local_attention`; with a bias of its own `bias` is ignored.
        """
        if self.relative_bias is not None:
            bias = self.relative_bias(self.window.left)
        parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if x.shape[1] == 1:  # the same, in one operation
            q, k, v = (part.view(x.shape[0], self.num_heads, 1, -1) for part in parts)
        else:
            q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        if isinstance(served := past.get("keys"), ServedKeys):
            return self.o_proj(served.attend(q, k, v, scale=q.shape[-1] ** -0.5, bias=bias)), {}
        y, state = local_attention(
            q,
            k,
            v,
            window=self.window,
            chunk_size=self.chunk_size,
            bias=bias,
            dropout=self.dropout.p if self.dropout.training else 0.0,
            rows=rows,
            initial_state=AttentionState(past["keys"], past["values"], past["seen"]) if past else None,
        )
        return self.o_proj(y.transpose(1, 2).flatten(2)), {} if state is None else state._asdict()
