"""What layers that attend to the states of blocks share: the attention, and where a block begins and ends."""

import torch

from hf_hybrid_ssm.models.bst.block_grid import BlockGrid
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise


def scaled_queries(queries: torch.Tensor, head_scale: torch.Tensor | None) -> torch.Tensor:
    """Queries (B, L, H, e), L2-normalised and times |head_scale| (H,), or without it times e**-0.5."""
    if head_scale is None:
        return queries * queries.shape[-1] ** -0.5
    return l2_normalise(queries) * head_scale.abs().to(queries.dtype).unsqueeze(1)


def attend_blocks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, grid: BlockGrid, head_scale: torch.Tensor | None
) -> torch.Tensor:
    """Cross-attention of tokens to states of their blocks, of which each token sees all.

    Args:
        queries: (B, L, H, e), not yet scaled.
        keys, values: (B, J, S, H, e), or (B, J, S, G, e) for H / G queries each.
        grid: the blocks of the tokens.
        head_scale: as of `scaled_queries`.

    Returns:
        (B, L, H, e).
    """
    blocks = grid.to_blocks(scaled_queries(queries, head_scale))
    keys, values = (for_each_query(part, queries.shape[2]) for part in (keys, values))
    q, k, v = (part.flatten(0, 1).transpose(1, 2) for part in (blocks, keys, values))
    y = attention(q, k, v, scale=1.0).transpose(1, 2)
    return grid.from_blocks(y.unflatten(0, blocks.shape[:2]))


def for_each_query(heads: torch.Tensor, num_queries: int) -> torch.Tensor:
    """Keys or values (..., G, e) that H / G queries share → (..., H, e)."""
    groups = num_queries // heads.shape[-2]
    return heads if groups == 1 else heads.repeat_interleave(groups, -2)


def boundaries(seen: torch.Tensor, window: int) -> tuple[bool, bool]:
    """Whether the next token of some sequence is the first of its document, and whether one is the last of its block.
    Both are True where finding out would wait for the device.

    Args:
        seen: (B,) int64, tokens so far.
        window: W.
    """
    if not can_read_values(seen):
        return True, True
    ranks = seen.tolist()
    return 0 in ranks, any(rank % window == window - 1 for rank in ranks)
