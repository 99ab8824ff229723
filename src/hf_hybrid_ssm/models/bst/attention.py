"""Attention of a Block-State Transformer layer: to the window, and to context states or recurrent states."""

from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.layers.attention_sink import AttentionSink, Rotation
from hf_hybrid_ssm.layers.l2_normalise import l2_normalise
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.block_grid import BlockGrid, block_grid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates, attend_context, newest_last, slot_by_slot
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.cache import States
from hf_hybrid_ssm.models.rotary import rotated
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, document_ranks, local_attention, window_token

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (B or 1, L, e) of rotary positions."""


class BstAttention(nn.Module):
    """Attention to the W tokens before; a "bst" layer also attends to the context states of the block, a
    "block_recurrent" layer to its recurrent states.

    Queries and keys are L2-normalised; the logits, T5's bias included, are multiplied by a learned scale per head, as
    in the official code of Block-Recurrent Transformers (arXiv 2203.07852). With `rope_parameters`
    the queries and keys of tokens are rotated instead of biased; `num_key_value_heads` G below H are shared by H / G
    queries each. `attention_sink` adds a sink to the window (`AttentionSink`).
    """

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.num_heads, self.head_dim, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.qk_norm, self.dropout = config.qk_norm, config.attention_dropout
        self.is_bidirectional = config.bidirectional
        self.right = config.sliding_window if config.bidirectional else 0 if config.attend_self else -1
        self.zero_kv_sink = config.zero_kv_sink and not config.bidirectional
        bias, eps, shared = config.attention_bias, config.layer_norm_epsilon, inner // self.groups
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
        self.has_scalar_sink = kind == "scalar"
        self.context: ContextStates | None = None
        self.recurrent: RecurrentStates | None = None
        block_type = config.block_types[layer_idx]
        if block_type == "bst":
            self.context = ContextStates(config)
            self.has_state_of_token = config.context_variant != "mf"  # each token a context state, and sees it
        elif block_type == "block_recurrent":
            self.recurrent = RecurrentStates(config)
        if block_type != "sliding_attention":
            self.context_q_proj = nn.Linear(width, inner, bias=bias)
            self.context_q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
            self.context_scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        self.o_proj = nn.Linear(inner if block_type == "sliding_attention" else 2 * inner, width, bias=bias)

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
        if self._takes_one_token(rows, past):
            return self._attend_one_token(z, x, past, rows, position_embeddings, sink_rotation)
        q, k, v = self._heads(z)
        bias = None if self.relative_bias is None else self.relative_bias(self.window)
        if self.scale is not None:
            scale = self.scale.abs().to(q.dtype).unsqueeze(1)
            q, k, bias = l2_normalise(q) * scale, l2_normalise(k), None if bias is None else bias * scale
        sink = {}
        if self.sink is not None:
            rank = document_ranks(z.shape[1], seen=past.get("seen"), seq_idx=rows.seq_idx, device=z.device)
            sink = self.sink(q, rank, **self._of_sink(bias, sink_rotation))
        unrotated = k
        if position_embeddings is not None:
            cos, sin = (part[:, : z.shape[1]] for part in position_embeddings)  # rollback replays fewer tokens
            q, k = rotated(q, k, (cos, sin), v.dtype)
        y, state = local_attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            window=(self.window, self.right),
            bias=bias,
            scale=1.0 if self.qk_norm else None,
            zero_kv_sink=self.zero_kv_sink,
            **sink,
            dropout=self.dropout if self.training else 0.0,
            rows=rows,
            initial_state=AttentionState(*(past[name] for name in AttentionState._fields)) if past else None,
        )
        y = y.transpose(1, 2)
        states: States = {} if state is None else state._asdict()
        if self.context is not None:
            crossed, more = self._attend_context(z, x, past, rows)
        elif self.recurrent is not None:
            crossed, more = self._attend_recurrent(z, *self._for_every_query(unrotated, v), past, rows)
        else:
            return self.o_proj(y.flatten(2)), states
        return self.o_proj(torch.cat([y.flatten(2), crossed.flatten(2)], dim=2)), states | more

    def _heads(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, L, H, e), keys and values (B, L, G, e)."""
        q, k, v = (layer(z).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:  # under autocast they are float32
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q, k, v

    def _of_sink(self, bias: torch.Tensor | None, rotation: Rotation | None) -> dict[str, Any]:
        """What the sink is given beside queries and ranks; the bias (H, R) is scaled as the queries are."""
        options = {"left": self.window, "scale": 1.0 if self.qk_norm else self.head_dim**-0.5, "rotation": rotation}
        return options | {"is_rotary": bias is None, "bias": None if bias is None else bias[:, -1]}

    def _for_every_query(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., G, e) → (..., H, e)."""
        if self.groups == 1:
            return keys, values
        return keys.repeat_interleave(self.groups, -2), values.repeat_interleave(self.groups, -2)

    def _attend_context(
        self, z: torch.Tensor, x: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, States]:
        """Cross-attention of the tokens to the context states of their blocks, (B, L, H, e); equations 3.3, 3.4."""
        queries = self._context_queries(z)
        if self.has_state_of_token:
            return self._attend_context_along_rows(queries, x, past, rows)
        grid = self._grid(x, past, rows)
        keys, values, states = self.context(x, grid, past or None, rows)
        keys, values = self._for_every_query(keys, values)
        return grid.from_blocks(attend_context(grid.to_blocks(queries), keys, values)), states

    def _attend_context_along_rows(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, States]:
        """`_attend_context` of "sh" and "mh", whose blocks have a context state for each of their tokens: attention
        within chunks of W tokens."""
        keys, values, ssm = self.context.along_rows(x, past or None, rows)
        state = None
        if past:
            held = [newest_last(past[name], past["seen"]) for name in ("context_key", "context_value")]
            state = AttentionState(held[0], held[1], past["seen"])
        right = self.window - 1 if self.is_bidirectional else 0
        y, after = local_attention(
            *(part.transpose(1, 2) for part in (queries, keys, values)),
            window=(self.window - 1, right),
            chunk_size=self.window,
            scale=1.0,
            rows=rows,
            initial_state=state,
        )
        states: States = {}
        if after is not None:
            unfinished = (slot_by_slot(part, after.seen, self.window) for part in (after.keys, after.values))
            states = self.context.named_states(ssm, *unfinished)
        return y.transpose(1, 2), states

    def _attend_recurrent(
        self,
        z: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        past: States,
        rows: Rows,
    ) -> tuple[torch.Tensor, States]:
        """Cross-attention of the tokens to the recurrent states at the start of their blocks, (B, L, H, e)."""
        grid = self._grid(z, past, rows)
        state_keys, state_values, after = self.recurrent(
            keys, values, grid, past or None, return_state=rows.return_final_state
        )
        blocks = attend_context(grid.to_blocks(self._context_queries(z)), state_keys, state_values)
        return grid.from_blocks(blocks), after

    def _grid(self, x: torch.Tensor, past: States, rows: Rows) -> BlockGrid:
        """Where the tokens of x (B, L, d) lie in the blocks of their documents."""
        return block_grid(
            x.shape[0],
            x.shape[1],
            self.window,
            tokens_seen=past.get("seen"),
            rows=rows,
            device=x.device,
        )

    def _context_queries(self, z: torch.Tensor) -> torch.Tensor:
        """Queries of the cross-attention (B, L, H, e), scaled."""
        queries = self._context_heads(z)
        if self.context_scale is None:
            return queries * self.head_dim**-0.5
        return l2_normalise(queries) * self.context_scale.abs().to(queries.dtype).unsqueeze(1)

    def _context_heads(self, z: torch.Tensor) -> torch.Tensor:
        """Queries of the cross-attention (B, L, H, e), not yet scaled."""
        queries = self.context_q_proj(z).unflatten(2, (self.num_heads, -1))
        return queries if self.context_q_norm is None else self.context_q_norm(queries).to(queries.dtype)

    def _takes_one_token(self, rows: Rows, past: States) -> bool:
        """Whether `_attend_one_token` computes this: a step of a layer that sees no adapters that PEFT's
        `target_parameters` put into the `forward` of context or recurrent states."""
        if not rows.is_step or not past or (self.training and self.dropout > 0):
            return False
        if self.context is not None:
            return isinstance(self.context, ContextStates)
        return self.recurrent is None or isinstance(self.recurrent, RecurrentStates)

    def _attend_one_token(
        self,
        z: torch.Tensor,
        x: torch.Tensor,
        past: States,
        rows: Rows,
        position_embeddings: PositionEmbeddings | None,
        sink_rotation: Rotation | None,
    ) -> tuple[torch.Tensor, States]:
        """`forward` of a step, whose kernels normalise and scale by themselves."""
        q, k, v = self._heads(z)
        states, crossed, scale = dict(past), None, 1.0 if self.qk_norm else None
        scales = {"scale": scale, "head_scale": getattr(self, "context_scale", None)}
        if self.context is not None:
            queries = self._context_heads(z).transpose(1, 2)
            crossed, more = self.context.attend_one_token(queries, x, past, rows, **scales)
            states |= more
        elif self.recurrent is not None:
            key, value = self._for_every_query(k if self.scale is None else l2_normalise(k), v)
            queries = self._context_heads(z).transpose(1, 2)
            crossed, more = self.recurrent.attend_one_token(queries, key, value, past, rows, **scales)
            states |= more
        bias = None if self.relative_bias is None else self.relative_bias(self.window)
        sink = {} if self.sink is None else self._sink_of_token(q, bias, past["seen"], sink_rotation)
        if position_embeddings is not None:
            q, k = rotated(q, k, position_embeddings, v.dtype)
        y, state = window_token(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            AttentionState(past["keys"], past["values"], past["seen"]),
            rows,
            window=(self.window, self.right),
            bias=bias,
            scale=scale,
            head_scale=self.scale,
            zero_kv_sink=self.zero_kv_sink,
            **sink,
        )
        y = y if crossed is None else torch.cat([y.flatten(1), crossed.flatten(1)], 1)
        return self.o_proj(y.flatten(1).unsqueeze(1)), states | state._asdict()

    def _sink_of_token(
        self, q: torch.Tensor, bias: torch.Tensor | None, seen: torch.Tensor, rotation: Rotation | None
    ) -> dict[str, torch.Tensor | None]:
        """Of a token whose query (B, 1, H, e) and bias (H, R) the kernel will scale."""
        assert self.sink is not None
        if self.scale is not None and not self.has_scalar_sink:  # which asks for none of them
            scale = self.scale.abs().to(q.dtype).unsqueeze(1)
            q, bias = l2_normalise(q) * scale, None if bias is None else bias * scale
        return self.sink(q, seen.unsqueeze(1), **self._of_sink(bias, rotation))
