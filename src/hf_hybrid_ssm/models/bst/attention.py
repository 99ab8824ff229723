"""Attention of a Block-State Transformer layer: to the window, and beside it to context states or recurrent states."""

from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.layers.attention_sink import AttentionSink, Rotation
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.block_attention import for_each_query
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.cache import States
from hf_hybrid_ssm.models.rotary import rotated
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Window, document_ranks, local_attention

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (B or 1, L, e) of rotary positions."""


class WindowAttention(nn.Module):
    """Attention to the W tokens before: all that a "sliding_attention" layer attends to.

    Queries and keys are L2-normalised; the logits, T5's bias included, are multiplied by a learned scale per head, as
    in the official code of Block-Recurrent Transformers (arXiv 2203.07852). With `rope_parameters`
    the queries and keys of tokens are rotated instead of biased; `num_key_value_heads` G below H are shared by H / G
    queries each. `attention_sink` adds a sink to the window (`AttentionSink`).
    """

    num_outputs = 1
    """Outputs (B, L, H e) that `o_proj` takes side by side."""

    def __init__(self, config: BstConfig):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.num_heads, self.head_dim, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.dropout = config.attention_dropout
        right = config.sliding_window if config.bidirectional else 0 if config.attend_self else -1
        self.distances = Window.of((self.window, right))
        self.zero_kv_sink = config.zero_kv_sink and not config.bidirectional
        bias, eps, shared = (
            config.attention_bias,
            config.layer_norm_epsilon,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(width, inner, bias=bias)
        self.k_proj = nn.Linear(width, shared, bias=bias)
        self.v_proj = nn.Linear(width, shared, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.relative_bias: RelativeBias | None = None
        if config.rope_parameters is None:
            self.relative_bias = RelativeBias(
                self.num_heads,
                config.relative_attention_num_buckets,
                config.relative_attention_max_distance,
                bidirectional=config.bidirectional,
            )
        self.scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        sizes = {"heads": self.num_heads, "groups": config.num_key_value_heads, "head_dim": self.head_dim}
        kind = config.attention_sink
        self.sink = None if kind is None else AttentionSink(kind, **sizes)
        self._add_states(config)
        self.o_proj = nn.Linear(self.num_outputs * inner, width, bias=bias)

    def _add_states(self, config: BstConfig) -> None:
        """The modules of what is attended to beside the window. They come before `o_proj`: the order in which initial
        values are drawn is that of the modules."""

    def forward(
        self,
        z: torch.Tensor,
        x: torch.Tensor,
        past: States,
        rows: Rows = PLAIN_ROWS,
        *,
        position_embeddings: PositionEmbeddings | None = None,
        sink_rotation: Rotation | None = None,
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d) normalised and raw inputs, the states before them → (B, L, d), the states after them.

        Args:
            past, rows: as of `RecurrentMixin.forward_rows`.
            position_embeddings: cosines and sines (B or 1, at least L, e) of rotary positions.
            sink_rotation: of a constant sink, as of `sink_logits`.
        """
        q, k, v = self._heads(z)
        bias, head_scale = None if self.relative_bias is None else self.relative_bias(self.window), self.scale
        if head_scale is not None and not rows.is_step:  # the kernel of a step does it by itself
            (q, bias), k, head_scale = self._scaled(q, bias), l2_normalise(k), None
        sink: dict[str, Any] = {} if self.sink is None else self._of_sink(q, bias, past, rows, sink_rotation)
        unrotated = k
        if position_embeddings is not None:
            if not rows.is_step:  # rollback replays fewer tokens
                position_embeddings = position_embeddings[0][:, : z.shape[1]], position_embeddings[1][:, : z.shape[1]]
            q, k = rotated(q, k, position_embeddings, v.dtype)
        y, state = local_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            window=self.distances,
            bias=bias,
            scale=None if self.scale is None else 1.0,
            head_scale=head_scale,
            zero_kv_sink=self.zero_kv_sink,
            **sink,
            dropout=self.dropout if self.training else 0.0,
            rows=rows,
            initial_state=AttentionState(past["keys"], past["values"], past["seen"]) if past else None,
        )
        crossed, states = self._attend_states(z, x, unrotated, v, past, rows)
        y = y.transpose(1, 2).flatten(2)
        y = self.o_proj(y if crossed is None else torch.cat([y, crossed.flatten(2)], 2))
        return y, states if state is None else state._asdict() | states

    def _heads(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, L, H, e), keys and values (B, L, G, e)."""
        shape = (-1, self.head_dim)
        q, k, v = self.q_proj(z).unflatten(2, shape), self.k_proj(z).unflatten(2, shape), self.v_proj(z)
        v = v.unflatten(2, shape)
        if self.q_norm is not None and self.k_norm is not None:  # under autocast they are float32
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q, k, v

    def _scaled(self, q: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries (B, L, H, e) normalised and scaled, and the bias (H, R) scaled."""
        assert self.scale is not None
        scale = self.scale.abs().to(q.dtype).unsqueeze(1)
        return l2_normalise(q) * scale, None if bias is None else bias * scale

    def _attend_states(
        self, z: torch.Tensor, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor | None, States]:
        """What the tokens find beside the window, (B, L, H, e), and the states after them.

        Args:
            z, x, past, rows: as of `forward`.
            k, v: the tokens' keys, not rotated, and values (B, L, G, e); keys are normalised but for a step.
        """
        return None, {}

    def _of_sink(
        self, q: torch.Tensor, bias: torch.Tensor | None, past: States, rows: Rows, rotation: Rotation | None
    ) -> dict[str, torch.Tensor | None]:
        """The sink's column of the softmax; queries and bias are scaled but for a step."""
        assert self.sink is not None
        if rows.is_step and past:
            rank = past["seen"].unsqueeze(1)
        else:
            rank = document_ranks(q.shape[1], seen=past.get("seen"), seq_idx=rows.seq_idx, device=q.device)
        if rows.is_step and self.scale is not None and self.sink.kind == "constant":
            q, bias = self._scaled(q, bias)
        options = {"left": self.window, "scale": self.head_dim**-0.5 if self.scale is None else 1.0}
        last = None if bias is None else bias[:, -1]
        return self.sink(q, rank, **options, rotation=rotation, is_rotary=bias is None, bias=last)


class StateAttention(WindowAttention):
    """Attention to the window and, with queries and a scale of its own, to the states of each token's block."""

    num_outputs = 2

    def _add_states(self, config: BstConfig) -> None:
        inner, eps = self.num_heads * self.head_dim, config.layer_norm_epsilon
        self.context_q_proj = nn.Linear(config.hidden_size, inner, bias=config.attention_bias)
        self.context_q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.context_scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None

    def _context_queries(self, z: torch.Tensor) -> torch.Tensor:
        """Queries of the cross-attention (B, L, H, e), not yet scaled."""
        queries = self.context_q_proj(z).unflatten(2, (self.num_heads, -1))
        return queries if self.context_q_norm is None else self.context_q_norm(queries).to(queries.dtype)


class ContextAttention(StateAttention):
    """A "bst" layer's: the tokens also attend to the context states of their blocks (equations 3.3 and 3.4)."""

    states_class = ContextStates

    def _add_states(self, config: BstConfig) -> None:
        self.context = self.states_class(config)
        super()._add_states(config)

    def _attend_states(
        self, z: torch.Tensor, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, States]:
        return self.context(self._context_queries(z), x, past, rows, head_scale=self.context_scale)


class RecurrentAttention(StateAttention):
    """A "block_recurrent" layer's: the tokens also attend to the recurrent states at the start of their blocks."""

    def _add_states(self, config: BstConfig) -> None:
        self.recurrent = RecurrentStates(config)
        super()._add_states(config)

    def _attend_states(
        self, z: torch.Tensor, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, States]:
        if self.scale is not None and rows.is_step:
            k = l2_normalise(k)
        tokens = for_each_query(k, self.num_heads), for_each_query(v, self.num_heads)
        return self.recurrent(self._context_queries(z), *tokens, past, rows, head_scale=self.context_scale)
