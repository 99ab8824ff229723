"""Rotary positions, as Llama has them."""

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin


class RotaryEmbedding(Float32ParametersMixin, LlamaRotaryEmbedding):
    """Llama's rotary positions, whose frequencies a cast of the model does not round.

    No checkpoint holds them: rounded ones would come back exact, and a reloaded model would compute something else.
    """

    float32_parameters = ("inv_freq", "original_inv_freq")


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
