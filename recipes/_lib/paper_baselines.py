"""The models that the papers of BST and SPADE compare with, as model types to train; importing this registers them.

`gss_hybrid` is BST's GSS-Hybrid (Mehta et al., 2022): gated state spaces, and a layer of sliding attention as every
fourth, from the second on. `mega_chunk` is SPADE's MEGA-chunk (Ma et al., 2022): moving-average gated attention in
chunks. Both stand in transformers' Mistral, with its norms, rotary positions and head. For whole rows: they keep no
cache, and reach over the borders of packed documents.
"""

from typing import Any

from _lib.peers import WholeRowsMixin, register

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mistral.modeling_mistral import MistralRMSNorm, apply_rotary_pos_emb

from hf_hybrid_ssm.layers import EMA, S4D
from hf_hybrid_ssm.ops.local_attention import local_attention


class GatedStateSpace(GradientCheckpointingLayer):
    """x + W_o (gelu(W_v x') * W_y S(norm(gelu(W_u x')))) with x' = norm(x); W_v and W_y lead to `gate_width`.

    S is an S4D of `state_space_width` channels, each with its own modes and step; the paper's DSS shares its modes and
    has no step.
    """

    def __init__(self, config: "GssHybridConfig"):
        super().__init__()
        width, narrow, wide = config.hidden_size, config.state_space_width, config.gate_width
        self.norm = MistralRMSNorm(width, eps=config.rms_norm_eps)
        self.gate_proj, self.in_proj = nn.Linear(width, wide), nn.Linear(width, narrow)
        self.state_space_norm = MistralRMSNorm(narrow, eps=config.rms_norm_eps)
        self.state_space = S4D(narrow, state_size=config.state_size)
        self.state_proj, self.out_proj = nn.Linear(narrow, wide), nn.Linear(wide, width)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x = self.norm(hidden_states)
        y = self.state_space(self.state_space_norm(F.gelu(self.in_proj(x))))
        return hidden_states + self.out_proj(F.gelu(self.gate_proj(x)) * self.state_proj(y))


class MovingAverageGatedAttention(nn.Module):
    """MEGA's layer on x and x' = norm(x), with softmax in chunks of `chunk_size`; the average with a skip and SiLU, as
    in its code. Rotary positions stand in the place of its bias by distance.

    m is the damped moving average of x'; z = silu(W_z m) of `head_dim`, q and k its affine maps with rotary
    positions, v = silu(W_v x') of `value_width`; r = silu(W_r m), u = sigmoid(W_u m), and
    h = silu(W_h m + U (r * attention(q, k, v))). The result is x + u (h - x).
    """

    def __init__(self, config: "MegaChunkConfig"):
        super().__init__()
        width, shared, values = config.hidden_size, config.head_dim, config.value_width
        self.chunk_size, self.sizes = config.chunk_size, (width, shared, values, width)
        self.average = EMA(width, state_size=config.state_size)
        self.value_proj, self.average_proj = nn.Linear(width, values), nn.Linear(width, sum(self.sizes))
        self.out_proj = nn.Linear(values, width, bias=False)
        self.scale = nn.Parameter(0.02 * torch.randn(2, shared))
        self.shift = nn.Parameter(torch.zeros(2, shared))

    def forward(self, x: Tensor, normed: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        update, z, reset, state = self.average_proj(self.average(normed)).split(self.sizes, dim=-1)
        z = F.silu(z)[:, None]
        q, k = apply_rotary_pos_emb(*(z * s + b for s, b in zip(self.scale, self.shift)), *position_embeddings)
        v = F.silu(self.value_proj(normed))[:, None]
        q, k = q.to(v.dtype), k.to(v.dtype)  # with autocast only what comes from a projection has its dtype
        read = local_attention(q, k, v, window=(None, 0), chunk_size=self.chunk_size)[0].squeeze(1)
        h = F.silu(state + self.out_proj(F.silu(reset) * read))
        return x + torch.sigmoid(update) * (h - x)


class MegaLayer(GradientCheckpointingLayer):
    """`MovingAverageGatedAttention`, and a feed-forward of `intermediate_size` with SiLU."""

    def __init__(self, config: "MegaChunkConfig"):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = MistralRMSNorm(width, eps=config.rms_norm_eps)
        self.attention = MovingAverageGatedAttention(config)
        self.feed_forward_norm = MistralRMSNorm(width, eps=config.rms_norm_eps)
        self.feed_forward = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        x = self.attention(hidden_states, self.attention_norm(hidden_states), position_embeddings)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GssHybridConfig(MistralConfig):
    """As `MistralConfig`, for the attention of every fourth layer."""

    model_type = "gss_hybrid"

    state_size: int = 64
    state_space_width: int = 256
    gate_width: int = 4096


class MegaChunkConfig(MistralConfig):
    """As `MistralConfig`, without its attention: `head_dim` is the width that q and k share."""

    model_type = "mega_chunk"

    state_size: int = 16
    value_width: int = 2048
    chunk_size: int = 512


class _Mixed(WholeRowsMixin, MistralForCausalLM):
    """A Mistral some or all of whose layers are `layer_class`."""

    layer_class: type[nn.Module]

    def __init__(self, config: MistralConfig):
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            if self.replaces(number):
                self.model.layers[number] = self.layer_class(config).apply(self._start)
        config.use_cache = False

    def replaces(self, number: int) -> bool:
        return True

    def _start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class GssHybridForCausalLM(_Mixed):
    config: GssHybridConfig
    config_class = GssHybridConfig
    layer_class = GatedStateSpace

    def replaces(self, number: int) -> bool:
        return number % 4 != 1


class MegaChunkForCausalLM(_Mixed):
    config: MegaChunkConfig
    config_class = MegaChunkConfig
    layer_class = MegaLayer


register(GssHybridConfig, GssHybridForCausalLM)
register(MegaChunkConfig, MegaChunkForCausalLM)
