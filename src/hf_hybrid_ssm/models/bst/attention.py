"""Attention of a Block-State Transformer layer: to the window, and beside it to context states or recurrent states."""

from collections.abc import Callable

import torch
from torch import nn

from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.cache import States
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Window, local_attention


class WindowAttention(nn.Module):
    """Attention to the W tokens before: all that a "window_attention" layer attends to.

    Queries and keys are L2-normalised; the logits, T5's bias included, are multiplied by a learned scale per head, as
    in the official code of Block-Recurrent Transformers (arXiv 2203.07852).
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
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.relative_bias = RelativeBias(
            self.num_heads,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            bidirectional=config.bidirectional,
        )
        self.scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        self._add_states(config)
        self.o_proj = nn.Linear(self.num_outputs * inner, width, bias=False)

    def _add_states(self, config: BstConfig) -> None:
        """The modules of what is attended to beside the window. They come before `o_proj`: the order in which initial
        values are drawn is that of the modules."""

    def forward(
        self, z: torch.Tensor, x: torch.Tensor, past: States, rows: Rows = PLAIN_ROWS
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d) normalised and raw inputs, the states before them → (B, L, d), the states after them; `past` and
        `rows` as of `RecurrentMixin.forward_rows`."""
        q, k, v = (layer(z).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        bias, head_scale = self.relative_bias(self.window), self.scale
        if self.scale is not None and not rows.is_step:  # the kernel of a step does it by itself
            scale = self.scale.abs().to(q.dtype).unsqueeze(1)
            q, k, bias, head_scale = l2_normalise(q) * scale, l2_normalise(k), bias * scale, None
        y, state = local_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            window=self.distances,
            bias=bias,
            scale=None if self.scale is None else 1.0,
            head_scale=head_scale,
            zero_kv_sink=self.zero_kv_sink,
            dropout=self.dropout if self.training else 0.0,
            rows=rows,
            initial_state=AttentionState(past["keys"], past["values"], past["seen"]) if past else None,
        )
        crossed, states = self._attend_states(z, x, k, v, past, rows)
        y = y.transpose(1, 2).flatten(2)
        y = self.o_proj(y if crossed is None else torch.cat([y, crossed.flatten(2)], 2))
        return y, states if state is None else state._asdict() | states

    def _attend_states(
        self, z: torch.Tensor, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor | None, States]:
        """What the tokens find beside the window, (B, L, H, e), and the states after them.

        Args:
            z, x, past, rows: as of `forward`.
            k, v: the tokens' keys and values (B, L, H, e); keys are normalised but for a step.
        """
        return None, {}


class StateAttention(WindowAttention):
    """Attention to the window and, with queries and a scale of its own, to the states of each token's block."""

    num_outputs = 2

    def _add_states(self, config: BstConfig) -> None:
        self.context_q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.context_scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None

    def _context_queries(self, z: torch.Tensor) -> torch.Tensor:
        """Queries of the cross-attention (B, L, H, e), not yet scaled."""
        return self.context_q_proj(z).unflatten(2, (self.num_heads, -1))


class ContextAttention(StateAttention):
    """A "bst" layer's: the tokens also attend to the context states of their blocks (equations 3.3 and 3.4)."""

    states_class: Callable[[BstConfig], ContextStates] = ContextStates

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
        return self.recurrent(self._context_queries(z), k, v, past, rows, head_scale=self.context_scale)
