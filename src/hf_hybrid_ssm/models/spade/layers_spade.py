"""The layers of SPADE: local attention, the branch with the state-space model, and the blocks (section 3 of the
paper)."""

from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hybrid_ssm.layers.mixers.base import mixer_state, named_states
from hf_hybrid_ssm.layers.mixers.registry import mixer_from_config
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.norms import build_norm
from hf_hybrid_ssm.models.unpadding import Unpadding
from hf_hybrid_ssm.ops.local_attention import AttentionState, local_attention

States = dict[str, torch.Tensor]
ATTENTION_STATES = ("keys", "values", "seen")


def attention_window(config: SpadeConfig, is_causal: bool) -> dict[str, Any]:
    """The keys a token sees, as `local_attention` takes them."""
    if config.attention_type == "full":
        return {"nearest": 0 if is_causal else None, "farthest": None}
    if config.attention_type == "chunk":
        farthest = config.chunk_size - 1
        return {"nearest": 0 if is_causal else -farthest, "farthest": farthest, "chunk_size": config.chunk_size}
    return {"nearest": 0 if is_causal else -(config.sliding_window - 1), "farthest": config.sliding_window - 1}


class SpadeAttention(nn.Module):
    """Scaled attention within a window, a chunk or everything, with T5's bias by distance."""

    def __init__(self, config: SpadeConfig, is_causal: bool, bias: bool = False):
        super().__init__()
        self.reach = attention_window(config, is_causal)
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.dropout = config.attention_dropout
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)
        self.relative_bias = None
        if config.relative_bias_scope == "per_layer":
            self.relative_bias = relative_bias(config, is_causal)

    def forward(
        self, x: torch.Tensor, past: States, bias: torch.Tensor | None, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d), the states before it → (B, L, d), the states after it; `options` are those of the op."""
        q, k, v = (layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in self._inputs())
        if self.relative_bias is not None:
            bias = self.relative_bias(self.reach["farthest"])
        y, state = local_attention(
            q,
            k,
            v,
            **self.reach,
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
            initial_state=AttentionState(*(past[name] for name in ATTENTION_STATES)) if past else None,
            capacity=capacity if self.reach["farthest"] is None else None,
            **options,
        )
        return self.o_proj(y.transpose(1, 2).flatten(2)), {} if state is None else state._asdict()

    def _inputs(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q_proj, self.k_proj, self.v_proj


def relative_bias(config: SpadeConfig, is_causal: bool) -> RelativeBias:
    """T5's table for this stack."""
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    return RelativeBias(config.num_attention_heads, buckets, distance, bidirectional=not is_causal)


class SpadeMixer(nn.Module):
    """Local attention, in a global layer beside a state-space model: W [LN(ssm(x)) ; LN(attention(x))] + b."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = SpadeAttention(config, is_causal, attention_bias)
        self.combine, self.weight = config.ssm_merge, config.ssm_merge_weight
        self.stop_gradient = config.ssm_stop_gradient
        self.ssm = mixer_from_config(config, bidirectional=not is_causal) if layer_idx in config.ssm_layers else None
        if self.ssm is not None and self.combine != "stack":
            self.norm_global = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.norm_local = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        if self.ssm is not None and self.combine == "concat":
            self.aggregate = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """(B, L, d) → (B, L, d); the states go to and come from `past_key_values.layers[layer_idx]`."""
        lengths = None
        if unpadding is not None:
            x, lengths = unpadding.unpad(x), unpadding.lengths
            seq_idx = None if seq_idx is None else unpadding.unpad(seq_idx).cummax(1).values
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        past: States = {} if cache is None else cache.states
        capacity = getattr(cache, "max_cache_len", None)
        options: dict[str, Any] = {"seq_idx": seq_idx, "lengths": lengths, "return_final_state": cache is not None}
        y, states = self._mix(x, past, bias, capacity, options)
        if cache is not None:

            def recompute(num_tokens: int) -> States:
                kept = {
                    "seq_idx": None if seq_idx is None else seq_idx[:, :num_tokens],
                    "lengths": None if unpadding is None else unpadding.lengths_of_first(num_tokens),
                }
                return self._mix(x[:, :num_tokens], past, bias, capacity, options | kept)[1]

            cache.update_states(x.shape[1], states, recompute)
        return y if unpadding is None else unpadding.repad(y)

    def _mix(
        self, x: torch.Tensor, past: States, bias: torch.Tensor | None, capacity: int | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, States]:
        attention_past = {name: past[name] for name in ATTENTION_STATES} if past else {}
        if self.ssm is None:
            return self.self_attn(x, attention_past, bias, capacity, **options)
        g, ssm_states = self._global(x.detach() if self.stop_gradient else x, past, options)
        a, states = self.self_attn(g if self.combine == "stack" else x, attention_past, bias, capacity, **options)
        states = states | ssm_states
        if self.combine == "stack":
            return a, states
        g, a = self.norm_global(g), self.norm_local(a)
        if self.combine == "add":
            return self.weight * g + (1 - self.weight) * a, states
        return self.aggregate(torch.cat([g, a], dim=-1)), states

    def _global(self, x: torch.Tensor, past: States, options: dict[str, Any]) -> tuple[torch.Tensor, States]:
        """The state-space model, whose state (one tensor or several) is kept by the names of `named_states`."""
        state = mixer_state(past)
        if state is not None and x.shape[1] == 1 and options["lengths"] is None and options["seq_idx"] is None:
            y, final = self.ssm.step(x[:, 0], state)
            y = y.unsqueeze(1)
        else:
            y, final = self.ssm(x, initial_state=state, **options)
        return y, named_states(final)


class SpadeFeedForward(nn.Module):
    """W_2 act(W_1 x + b_1) + b_2."""

    def __init__(self, config: SpadeConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


class SpadeBlock(GradientCheckpointingLayer):
    """Mixing and feed-forward sublayers, with the norm before each (`pre`) or behind each sum (`post`)."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.is_pre = config.norm_position == "pre"
        self.mixing = SpadeMixer(config, layer_idx, is_causal, attention_bias)
        self.mixing_norm = build_norm(config.norm_type, config.hidden_size, config.layer_norm_epsilon)
        self.feed_forward = SpadeFeedForward(config)
        self.feed_forward_norm = build_norm(config.norm_type, config.hidden_size, config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        bias: torch.Tensor | None = None,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        mixing = {"bias": bias, "unpadding": unpadding, "seq_idx": seq_idx, "past_key_values": past_key_values}
        hidden_states = self._residual(hidden_states, self.mixing, self.mixing_norm, **mixing)
        return self._residual(hidden_states, self.feed_forward, self.feed_forward_norm)

    def _residual(self, x: torch.Tensor, branch: nn.Module, norm: nn.Module, **options: Any) -> torch.Tensor:
        if self.is_pre:
            return x + self.dropout(branch(norm(x), **options))
        return norm(x + self.dropout(branch(x, **options)))
