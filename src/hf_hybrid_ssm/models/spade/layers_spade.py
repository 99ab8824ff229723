"""The layers of SPADE: local attention, the branch with the state-space model, and the blocks (section 3 of the
paper)."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_hybrid_ssm.layers.feed_forward import FeedForward
from hf_hybrid_ssm.layers.local_self_attention import LocalSelfAttention
from hf_hybrid_ssm.layers.mixers.base import mixer_state, named_states
from hf_hybrid_ssm.layers.mixers.registry import mixer_from_config
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows


class ScaleNorm(nn.Module):
    """One learned scalar times x / rms(x)."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale


class TimeBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, L, D) over batch and time: over the tokens that are not padding.

    The running statistics take in each batch once, also where gradient checkpointing runs the forward again.
    """

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, L, D) → the same; `token_mask` (B, L) bool, the tokens that count; None: all."""
        repeats = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # within a backward
        if not self.training or (token_mask is None and not repeats):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)
        if token_mask is None:  # the same operation, on statistics that nobody keeps
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
            self._take_in(mean.detach(), variance.detach() * (count / (count - 1).clamp(min=1)))
        normalised = (wide - mean) * torch.rsqrt(variance + self.eps)
        return (normalised * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def _take_in(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running statistics towards those of a batch, as torch does."""
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), self.momentum)


def build_norm(config: SpadeConfig) -> nn.Module:
    """The normalisation of (B, L, hidden_size) that `config.norm_type` names."""
    size, eps = config.hidden_size, config.layer_norm_epsilon
    if config.norm_type == "layernorm":
        return nn.LayerNorm(size, eps=eps)
    return ScaleNorm(eps) if config.norm_type == "scalenorm" else TimeBatchNorm(size, eps=eps)


def normalised(norm: nn.Module | None, x: torch.Tensor, rows: PackedRows | None) -> torch.Tensor:
    """norm(x) of (B, L, d), x itself without a norm; what is taken over tokens leaves the padding in `rows` out."""
    if isinstance(norm, TimeBatchNorm):
        return norm(x, None if rows is None else rows.token_mask)
    return x if norm is None else norm(x)


def attention_window(config: SpadeConfig, is_causal: bool) -> dict[str, Any]:
    """The keys a token sees, as `local_attention` takes them."""
    if config.attention_type == "full":
        return {"window": (None, 0 if is_causal else None)}
    size = config.chunk_size if config.attention_type == "chunk" else config.sliding_window
    window = (size - 1, 0 if is_causal else size - 1)
    return {"window": window, "chunk_size": size if config.attention_type == "chunk" else None}


class SpadeAttention(LocalSelfAttention):
    """Scaled attention within a window, a chunk or everything, with T5's bias by distance."""

    def __init__(self, config: SpadeConfig, is_causal: bool, bias: bool = False):
        window = attention_window(config, is_causal)
        sizes = (config.hidden_size, config.num_attention_heads)
        super().__init__(*sizes, **window, bias=bias, dropout=config.attention_dropout)
        has_own_bias = config.relative_bias_scope == "per_layer"
        self.relative_bias = relative_bias(config, is_causal) if has_own_bias else None

    def forward(
        self, x: torch.Tensor, past: States, rows: Rows = PLAIN_ROWS, *, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, States]:
        """As in `LocalSelfAttention`; `bias` (H, R) is the one shared by all layers, used without one of its own."""
        return super().forward(x, past, rows, bias=self._bias(bias))

    def _bias(self, shared: torch.Tensor | None) -> torch.Tensor | None:
        return shared if self.relative_bias is None else self.relative_bias(self.window.left)


def relative_bias(config: SpadeConfig, is_causal: bool) -> RelativeBias:
    """T5's table for this stack."""
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    return RelativeBias(config.num_attention_heads, buckets, distance, bidirectional=not is_causal)


class SpadeMixer(RecurrentMixin, nn.Module):
    """Local attention; in a layer of `ssm_layers` also a state-space model, W [LN(ssm(x)) ; LN(attention(x))] + b."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = SpadeAttention(config, is_causal, attention_bias)
        self.merge, self.weight = config.ssm_merge, config.ssm_merge_weight
        self.stop_gradient = config.ssm_stop_gradient
        self.ssm = mixer_from_config(config, bidirectional=not is_causal) if layer_idx in config.ssm_layers else None
        if self.ssm is not None and self.merge != "stack":
            self.norm_global = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.norm_local = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        if self.ssm is not None and self.merge == "concat":
            self.aggregate = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """(B, L, d) → (B, L, d); `options` are those of `forward_with_cache`, and `bias`, shared by all layers."""
        return self.forward_with_cache(x, **options)

    def forward_rows(  # type: ignore[override]
        self, x: torch.Tensor, *, past: States, rows: Rows, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, States]:
        if self.ssm is None:
            return self.self_attn(x, past, rows, bias=bias)
        u = x.detach() if self.stop_gradient else x
        g, state = self.ssm(u, rows=rows, initial_state=mixer_state(past))
        a, states = self.self_attn(g if self.merge == "stack" else x, past, rows, bias=bias)
        return self._merged(g, a), states | named_states(state)

    def _merged(self, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """The outputs of state-space model and attention, (B, L, d) each, as one."""
        if self.merge == "stack":
            return a
        g, a = self.norm_global(g), self.norm_local(a)
        if self.merge == "add":
            return self.weight * g + (1 - self.weight) * a
        return self.aggregate(torch.cat([g, a], dim=-1))


class SpadeBlock(GradientCheckpointingLayer):
    """Mixing and feed-forward sublayers, with the norm before each (`pre`) or after each sum (`post`)."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.is_pre = config.norm_position == "pre"
        self.mixing = SpadeMixer(config, layer_idx, is_causal, attention_bias)
        self.mixing_norm = build_norm(config)
        activation, dropout = ACT2FN[config.hidden_act], config.activation_dropout
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, activation, dropout=dropout)
        self.feed_forward_norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        bias: torch.Tensor | None = None,
        rows: PackedRows | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        mixing = {"bias": bias, "rows": rows, "cache": cache}
        hidden_states = self._residual(hidden_states, rows, self.mixing, self.mixing_norm, **mixing)
        return self._residual(hidden_states, rows, self.feed_forward, self.feed_forward_norm)

    def _residual(
        self, x: torch.Tensor, rows: PackedRows | None, branch: nn.Module, norm: nn.Module, /, **options: Any
    ) -> torch.Tensor:
        y = branch(normalised(norm, x, rows) if self.is_pre else x, **options)
        x = x + (self.dropout(y) if self.training else y)
        return x if self.is_pre else normalised(norm, x, rows)


class SpadeStack:
    """The layers between embeddings and heads; a mixin of the causal model, the encoder and the decoder."""

    def _build_stack(self, config: SpadeConfig, blocks: Iterable[nn.Module], is_causal: bool) -> None:
        eps = config.layer_norm_epsilon
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.relative_bias = relative_bias(config, is_causal) if config.relative_bias_scope == "shared" else None
        self.layers = nn.ModuleList(blocks)
        self.norm = build_norm(config) if config.final_norm else None

    def _enter_stack(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(B, L, d) embeddings → the first layer's input."""
        return self.dropout(embeddings if self.embedding_norm is None else self.embedding_norm(embeddings))

    def _shared_bias(self) -> torch.Tensor | None:
        return None if self.relative_bias is None else self.relative_bias(None)
