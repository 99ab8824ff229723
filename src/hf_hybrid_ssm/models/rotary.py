"""Rotary positions, as Llama has them."""

import copy
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin


class RotaryEmbedding(Float32ParametersMixin, LlamaRotaryEmbedding):
    """Llama's rotary positions, whose frequencies a cast of the model does not round.

    No checkpoint holds them: rounded ones would come back exact, and a reloaded model would compute something else.
    """

    float32_parameters = ("inv_freq", "original_inv_freq")

    def __init__(self, config: Any):
        sized = copy.copy(config)
        vars(sized).setdefault("max_position_embeddings", None)  # which Llama's reads, and here may be absent
        super().__init__(sized)
        self.config = config


def with_sink_rotation(
    rotary_emb: RotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor, distance: int | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None]:
    """Cosines and sines of tokens (B or 1, L, head_dim), and those (head_dim) that turn a query by `distance` from a
    key that is not turned, as a constant sink's; None for a `distance` of None.

    Both come from one call, since some kinds of rotary positions scale queries and keys.
    """
    if distance is None:
        return rotary_emb(x, position_ids), None
    ends = (torch.arange(2, device=position_ids.device) * distance).expand(position_ids.shape[0], -1)
    cos, sin = rotary_emb(x, torch.cat([position_ids, ends], 1))
    scale = cos[0, -2]  # the cosines of position 0
    return (cos[:, :-2], sin[:, :-2]), (cos[0, -1] * scale, sin[0, -1] * scale)


def rotated(
    queries: torch.Tensor,
    keys: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (B, [L,] heads, head_dim), turned by the angles whose cosines and sines (B or 1, [L,] head_dim)
    a `RotaryEmbedding` gave; in the `dtype` of the values, since under autocast the angles are float32."""
    turned = apply_rotary_pos_emb(queries, keys, *position_embeddings, unsqueeze_dim=queries.dim() - 2)
    return turned[0].to(dtype), turned[1].to(dtype)
