"""Attention to a block's context states and to the best of many older ones, a memory without gradients.

The outlook of Block-State Transformers, after Memorizing Transformers (arXiv 2203.08913): each layer keeps the last M
context states of finished blocks, and the softmax of a token's query also covers the k with the largest logits.
"""

import torch

from hf_hybrid_ssm.models.bst.attention import ContextAttention
from hf_hybrid_ssm.models.bst.block_attention import scaled_queries
from hf_hybrid_ssm.models.bst.block_grid import BlockGrid, block_grid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.models.cache import States
from hf_hybrid_ssm.ops.core.rows import Rows

MEMORY_STATES = ("memory_key", "memory_value", "memory_count")


class RetrievingStates(ContextStates):
    """Context states beside a memory of older ones; a token alone goes the way of a row."""

    def __init__(self, config: BstConfig):
        super().__init__(config)
        assert config.retrieval_k is not None  # else its layer has no memory
        self.top_k, self.capacity, self.stride = config.retrieval_k, config.retrieval_memory, config.retrieval_stride

    def forward(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, rows: Rows, *, head_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, States]:
        (batch, length), seen = x.shape[:2], past.get("seen")
        grid = block_grid(batch, length, self.window, tokens_seen=seen, rows=rows, device=x.device)
        keys, values, states = self.by_block(x, grid, past, rows)
        attended, memory = attend_with_memory(
            grid.to_blocks(scaled_queries(queries, head_scale)),
            keys,
            values,
            grid,
            past or None,
            is_causal=self.variant != "mf",
            top_k=self.top_k,
            capacity=self.capacity,
            stride=self.stride,
        )
        return grid.from_blocks(attended), states | memory if rows.return_final_state else {}


class RetrievingAttention(ContextAttention):
    """`ContextAttention` whose tokens also attend to the best of the states that a memory holds."""

    states_class = RetrievingStates


def attend_with_memory(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    grid: BlockGrid,
    state: States | None,
    *,
    is_causal: bool,
    top_k: int,
    capacity: int,
    stride: int,
) -> tuple[torch.Tensor, States]:
    """Cross-attention of every block's tokens to its own context states and the retrieved ones, one softmax over both.

    Args:
        queries: (B, J, W, H, e), scaled.
        keys, values: (B, J, W or S, H, e), the context states of the blocks.
        grid: the blocks.
        state: the tensors `MEMORY_STATES` after earlier tokens, or None.
        is_causal: whether the token of slot s sees its block's own states up to slot s, or all of them.
        top_k: k, states that a token retrieves, for each head.
        capacity: M, states that the memory holds; the oldest fall out.
        stride: every `stride`-th state of a finished block is kept.

    Returns:
        (B, J, W, H, e), and the new state.
    """
    batch, blocks, window, heads, width = queries.shape
    if state is None:
        memory_key = memory_value = queries.new_zeros(batch, heads, capacity, width)
        count = torch.zeros(batch, dtype=torch.int64, device=queries.device)
    else:
        memory_key, memory_value, count = (state[name] for name in MEMORY_STATES)
    ages = torch.arange(capacity, 0, -1, device=queries.device)  # the newest is last
    slots = keys.shape[2]
    own = torch.ones(window, slots, dtype=torch.bool, device=queries.device).tril() if is_causal else None
    outputs = []
    for j in range(blocks):
        count = torch.where(grid.is_first_block[:, j], 0, count)
        q, k, v = (part[:, j].transpose(1, 2) for part in (queries, keys, values))
        scores = q @ k.mT
        if own is not None:
            scores = scores.masked_fill(~own, -torch.inf)
        older = (q @ memory_key.mT).masked_fill((ages > count.unsqueeze(1))[:, None, None], -torch.inf)
        least = older.topk(min(top_k, capacity)).values[..., -1:]
        older = older.masked_fill(older < least, -torch.inf)
        joint = torch.cat([scores, older], -1)
        weights = joint.softmax(-1)
        outputs.append((weights @ torch.cat([v, memory_value], 2)).transpose(1, 2))
        finished = j < grid.next_block  # (B,) this sequence has read the block to its end
        memory_key = _pushed(memory_key, k[:, :, stride - 1 :: stride], finished)
        memory_value = _pushed(memory_value, v[:, :, stride - 1 :: stride], finished)
        count = torch.where(finished, (count + k[:, :, stride - 1 :: stride].shape[2]).clamp(max=capacity), count)
    # the next token may begin a new document, whose memory is empty
    rows = torch.arange(batch, device=queries.device)
    count = torch.where(grid.is_first_block[rows, grid.next_block], 0, count)
    return torch.stack(outputs, 1), dict(zip(MEMORY_STATES, (memory_key, memory_value, count)))


def _pushed(memory: torch.Tensor, new: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """(B, H, M, e) with the states of a finished block after the others, detached."""
    after = torch.cat([memory, new.detach().to(memory.dtype)], 2)[:, :, -memory.shape[2] :]
    return torch.where(finished[:, None, None, None], after, memory)
