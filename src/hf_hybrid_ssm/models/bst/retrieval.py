"""Attention to a block's context states and to the best of many older ones, a memory without gradients.

Future work of the Block-State paper, after Memorizing Transformers (arXiv 2203.08913): each layer keeps the last M
context states of finished blocks, and the softmax of a token's query also covers the k with the largest logits.
"""

import torch

from hf_hybrid_ssm.models.bst.block_states import CONTEXT, BlockGrid, block_grid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.l2_normalise import scaled_queries
from hf_hybrid_ssm.ops.core.rows import Rows

MEMORY_STATES = ("memory_key", "memory_value", "memory_count")


class RetrievingStates(ContextStates):
    """Context states beside a memory of older ones; a step has no kernel of its own."""

    def __init__(self, config: BstConfig):
        super().__init__(config)
        assert config.retrieval_k is not None  # else its layer has no memory
        self.top_k, self.capacity, self.stride = config.retrieval_k, config.retrieval_memory, config.retrieval_stride

    def forward(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, rows: Rows, *, head_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, States]:
        grid = block_grid(x, self.window, past, rows)
        keys, values, states = self.by_block(x, grid, past, rows)
        blocks = grid.to_blocks(scaled_queries(queries, head_scale))
        attended, memory = self._attend(blocks, keys, values, grid, past)
        return grid.from_blocks(attended), states | memory if rows.return_final_state else {}

    def by_block(
        self, x: torch.Tensor, grid: BlockGrid, past: States, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, States]:
        """As in `ContextStates`, and of "sh" and "mh", whose blocks have W states."""
        if self.variant == "mf":
            return super().by_block(x, grid, past, rows)
        keys, values, ssm = self.by_token(x, past, rows)
        old_keys, old_values = (past[name].transpose(1, 2) if past else None for name in CONTEXT)
        keys, values = grid.to_blocks(keys, old_keys), grid.to_blocks(values, old_values)
        if not rows.return_final_state:
            return keys, values, {}
        unfinished = (grid.unfinished(part).transpose(1, 2) for part in (keys, values))
        return keys, values, self.named_states(ssm, *unfinished)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, grid: BlockGrid, past: States
    ) -> tuple[torch.Tensor, States]:
        """Scaled queries (B, J, W, H, e), keys and values (B, J, W or S, H, e) of the blocks, one softmax over a
        block's own states and the retrieved ones → (B, J, W, H, e), and the memory after the tokens."""
        batch, blocks, window, heads, width = queries.shape
        if past:
            memory_key, memory_value, count = (past[name] for name in MEMORY_STATES)
        else:
            memory_key = memory_value = queries.new_zeros(batch, heads, self.capacity, width)
            count = torch.zeros(batch, dtype=torch.int64, device=queries.device)
        ages = torch.arange(self.capacity, 0, -1, device=queries.device)  # the newest is last
        later = None  # states of its block that a token does not see
        if self.variant != "mf":
            later = torch.ones(window, window, dtype=torch.bool, device=queries.device).triu(1)
        outputs = []
        for j in range(blocks):
            count = torch.where(grid.is_first_block[:, j], 0, count)
            q, k, v = (part[:, j].transpose(1, 2) for part in (queries, keys, values))
            scores = q @ k.mT if later is None else (q @ k.mT).masked_fill(later, -torch.inf)
            older = (q @ memory_key.mT).masked_fill((ages > count.unsqueeze(1))[:, None, None], -torch.inf)
            least = older.topk(min(self.top_k, self.capacity)).values[..., -1:]
            older = older.masked_fill(older < least, -torch.inf)
            weights = torch.cat([scores, older], -1).softmax(-1)
            outputs.append((weights @ torch.cat([v, memory_value], 2)).transpose(1, 2))
            finished = j < grid.next_block  # (B,) this sequence has read the block to its end
            k, v = (part[:, :, self.stride - 1 :: self.stride] for part in (k, v))
            memory_key, memory_value = _pushed(memory_key, k, finished), _pushed(memory_value, v, finished)
            count = torch.where(finished, (count + k.shape[2]).clamp(max=self.capacity), count)
        # the next token may begin a new document, whose memory is empty
        rows = torch.arange(batch, device=queries.device)
        count = torch.where(grid.is_first_block[rows, grid.next_block], 0, count)
        return torch.stack(outputs, 1), dict(zip(MEMORY_STATES, (memory_key, memory_value, count)))


def _pushed(memory: torch.Tensor, new: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """(B, H, M, e) with the states of a finished block after the others, detached."""
    after = torch.cat([memory, new.detach().to(memory.dtype)], 2)[:, :, -memory.shape[2] :]
    return torch.where(finished[:, None, None, None], after, memory)
