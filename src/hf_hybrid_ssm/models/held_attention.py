"""Attention of one token to the keys and values that transformers' own cache layers hold."""

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import has_step_kernel, slot_attention

UNKNOWN = ("softcap", "position_bias", "s_aux")
"""What transformers may ask of an implementation of attention, and slots do not have."""


def held_attention(
    name: str, rows: Rows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> torch.Tensor | None:
    """(B, 1, heads, e) of one token of each row, where this is what implementation `name` would compute; else None.

    A static cache has places for tokens that are yet to come. torch's attention reads all of them under a mask; this
    one reads what the mask shows.

    Args:
        query, key, value: (B, H, 1, e), (B, G, T, e) and (B, G, T, v), those of the token among them.
        mask: (B or 1, 1, 1, T) bool, which of the T places the token sees; None: all.
        options: as of transformers' attention functions.
    """
    is_one = rows.is_step and query.is_cpu and query.shape[2] == 1
    if not is_one or name != "sdpa" or any(options.get(option) is not None for option in UNKNOWN):
        return None
    if options.get("dropout") or not (mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))):
        return None
    if ALL_ATTENTION_FUNCTIONS[name] is not sdpa_attention_forward:  # it may have been replaced by the user's own
        return None
    dense = all(tensor.stride(-1) == 1 for tensor in (key, value, mask) if tensor is not None)
    # under autocast angles make queries and keys float32, which torch's attention casts
    if not dense or not query.dtype == key.dtype == value.dtype or not has_step_kernel("cpu", key.dtype):
        return None
    shown = None if mask is None else mask[:, 0, 0].expand(query.shape[0], -1)
    return slot_attention(query, None, None, key, value, mask=shown, scale=options.get("scaling")).transpose(1, 2)
