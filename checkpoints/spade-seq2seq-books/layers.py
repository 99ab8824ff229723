# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 93f2be55b4caedc460c9123ab162e3da69317c6cdd5992972abe4c0ab50ba44b

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .local_attention import AttentionState, local_attention, window_step
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


# ---- layers/local_self_attention.py ---------------------------------------------------------------------------------
# Causal or two-sided self-attention within a window, with its projections and its state.

class LocalSelfAttention(nn.Module):
    """Multi-head `local_attention` of maps of one input.

    Args:
        hidden_size: d.
        num_heads: H, of size d / H.
        window, chunk_size: the keys a token sees, as `local_attention` takes them.
        bias: biases in the four maps.
        dropout: on the attention weights.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        window: tuple[int | None, int | None],
        chunk_size: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_heads, self.window, self.chunk_size, self.dropout = num_heads, window, chunk_size, dropout
        sizes = (hidden_size, hidden_size, bias)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(*sizes) for _ in range(4))

    def forward(
        self,
        x: torch.Tensor,
        past: dict[str, torch.Tensor],
        *,
        capacity: int | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(B, L, d), the states before it → (B, L, d), the states after it.

        Args:
            past: has the fields of `AttentionState` by name, or is empty.
            capacity: the number of keys to make room for, where all are kept.
            overwrite: x is one token after earlier ones, and its states may be computed in place of `past`.
            options: of `local_attention`.
        """
        if overwrite:
            return self._step(x, past, capacity, options.get("bias"))
        q, k, v = (
            layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y, state = local_attention(
            q,
            k,
            v,
            window=self.window,
            chunk_size=self.chunk_size,
            dropout=self.dropout if self.training else 0.0,
            initial_state=AttentionState(*(past[name] for name in AttentionState._fields)) if past else None,
            capacity=capacity if self.window[0] is None else None,
            **options,
        )
        return self.o_proj(y.transpose(1, 2).flatten(2)), {} if state is None else state._asdict()

    def _step(
        self, x: torch.Tensor, past: dict[str, torch.Tensor], capacity: int | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`forward` of one token, x (B, 1, d)."""
        heads = (x.shape[0], self.num_heads, -1)
        q, k, v = (layer(x).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        state = AttentionState(past["keys"], past["values"], past["seen"])
        options = {"window": self.window, "chunk_size": self.chunk_size, "bias": bias}
        y, state = window_step(q, k, v, state, keeps_address=capacity is not None, **options)
        return self.o_proj(y.flatten(1).unsqueeze(1)), state._asdict()
