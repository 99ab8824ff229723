"""States of blocks: where the tokens of a forward lie in the blocks of W tokens that every document is cut into, their
attention to the states of these blocks, and the context states of the variant "mf", S for each block.

Blocks count from the first token of a document, wherever a forward enters it and whatever else a packed sequence
holds. In a batch of new sequences, blocks are simply a reshape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from hf_hybrid_ssm.layers.mixers.base import MixerState, mixer_state
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.core.l2_normalise import scaled_queries
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Documents, Rows
from hf_hybrid_ssm.ops.local_attention import slot_attention

# of states before the first block, and of the IDs that tell states apart, as Block-Recurrent Transformers
INITIAL_STD, ID_STD = 0.1, 1.0
CONTEXT = ("context_key", "context_value")
"""The names of what a layer keeps of a block, (B, H, W or S, e) each."""


@dataclass(frozen=True)
class BlockGrid:
    """The blocks 0..J-1 that the tokens (B, L) of a forward touch, and block J after them.

    Args:
        window: W.
        length: L.
        starts: (B, J + 1) int64, column of each block's first token; negative where the block began in an earlier
            forward. Blocks that a sequence does not have start at L.
        is_first_block: (B, J + 1) bool, the block is the first of its document.
        tokens_seen: (B,) int64, tokens of the sequence's last document read so far, this forward included.
        next_block: (B,) int64, the block of the token that follows.
        block: (B, L) int64, the block of each token; None where every sequence is one document from its first token,
            whose blocks are a reshape.
    """

    window: int
    length: int
    starts: torch.Tensor
    is_first_block: torch.Tensor
    tokens_seen: torch.Tensor
    next_block: torch.Tensor
    block: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """J."""
        return self.starts.shape[1] - 1

    @property
    def ends(self) -> torch.Tensor:
        """(B, J) column of the token before each of the blocks 1..J (where that is in this forward)."""
        return (self.starts[:, 1:] - 1).clamp(0, self.length - 1)

    def to_blocks(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, L, ...) → (B, J, W, ...), slot by slot.

        `past` (B, W, ...) fills the slots of block 0 that belong to earlier forwards. Slots after a document's end
        hold finite values.
        """
        slots = torch.arange(self.window, device=x.device)
        if self.block is None:
            gap = self.num_blocks * self.window - self.length
            blocks = F.pad(x, (0, 0) * (x.dim() - 2) + (0, gap)) if gap else x
            blocks = blocks.unflatten(1, (self.num_blocks, self.window))
        else:
            columns = (self.starts[:, :-1, None] + slots).clamp(0, self.length - 1)
            blocks = _take(x, columns.flatten(1)).unflatten(1, columns.shape[1:])
        if past is None:
            return blocks
        offset = (-self.starts[:, 0]).clamp(min=0)  # tokens of block 0 in earlier forwards
        is_filled = _like((slots < offset.unsqueeze(1)), past)
        return torch.cat([torch.where(is_filled, past, blocks[:, 0]).unsqueeze(1), blocks[:, 1:]], dim=1)

    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """(B, J, W, ...) → (B, L, ...)."""
        if self.block is None:
            return blocks.flatten(1, 2)[:, : self.length]
        slot = torch.arange(self.length, device=blocks.device) - self.starts.gather(1, self.block)
        return _take(blocks.flatten(1, 2), self.block * self.window + slot)

    def unfinished(self, blocks: torch.Tensor) -> torch.Tensor:
        """From (B, J, W, ...) the block that the next token continues, (B, W, ...), zero where it is not yet
        filled."""
        last = self.next_block.clamp(max=self.num_blocks - 1)
        rows = torch.arange(blocks.shape[0], device=blocks.device)
        filled = torch.arange(self.window, device=blocks.device) < (self.tokens_seen % self.window).unsqueeze(1)
        last_block = blocks[rows, last]
        return torch.where(_like(filled, last_block), last_block, 0.0)


def block_grid(x: torch.Tensor, window: int, past: States, rows: Rows = PLAIN_ROWS) -> BlockGrid:
    """The grid of a forward of x (B, L, ...).

    Args:
        past: has `seen`, (B,) int64, the tokens of each sequence's first document in earlier forwards, or is empty.
        rows: how the sequences are read; values of `seq_idx` are, where `documents.count` is not enough.
    """
    (batch, length), device, lengths = x.shape[:2], x.device, rows.lengths
    real = torch.full((batch,), length, device=device) if lengths is None else lengths.to(torch.int64)
    if not past and rows.documents is None:
        indices = torch.arange(-(-length // window) + 1, device=device).expand(batch, -1)
        return BlockGrid(window, length, indices * window, indices == 0, real, real // window)
    before = past["seen"] if past else torch.zeros(batch, dtype=torch.int64, device=device)
    columns = torch.arange(length, device=device)
    if rows.documents is not None:
        return _packed_grid(window, columns, before, real, rows.documents)
    offset = before % window
    indices = torch.arange((length + window - 2) // window + 2, device=device)
    return BlockGrid(
        window=window,
        length=length,
        starts=indices * window - offset.unsqueeze(1),
        is_first_block=(before // window).unsqueeze(1) + indices == 0,
        tokens_seen=before + real,
        next_block=(offset + real) // window,
        block=(columns + offset.unsqueeze(1)) // window,
    )


def _packed_grid(
    window: int, columns: torch.Tensor, before: torch.Tensor, real: torch.Tensor, documents: Documents
) -> BlockGrid:
    """Every document restarts the blocks, so their number depends on where documents begin.

    Where counting them would synchronise with the device, an upper bound is used.
    """
    seq_idx, length = documents.seq_idx, len(columns)
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=False)
    # the tokens before each token in its document
    position = columns - torch.where(begins, columns, -before.unsqueeze(1)).cummax(1).values
    slot = position % window
    opens = slot == 0
    opens[:, 0] = True
    block = opens.cumsum(1) - 1
    if documents.count is None or can_read_values(block):
        num_blocks = int(block.max()) + 1
    else:
        num_blocks = length // window + documents.count + 1
    starts = torch.full((seq_idx.shape[0], num_blocks + 1), length, device=columns.device)
    starts = starts.scatter(1, block, columns - slot)
    first = torch.zeros_like(starts, dtype=torch.bool).scatter(1, block, position < window)
    last = (real - 1).clamp(min=0).unsqueeze(1)
    tokens_seen = torch.where(real > 0, position.gather(1, last).squeeze(1) + 1, before)
    next_block = block.gather(1, last).squeeze(1) + (tokens_seen % window == 0)
    next_block = torch.where(real > 0, next_block, 0)
    return BlockGrid(window, length, starts, first, tokens_seen, next_block, block)


def _take(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x (B, L, ...) at columns (B, M) → (B, M, ...)."""
    index = columns.view(*columns.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """mask (B, W) with the trailing dimensions of x (B, W, ...)."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


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
    blocks, groups = grid.to_blocks(scaled_queries(queries, head_scale)), queries.shape[2] // keys.shape[3]
    if groups > 1:
        keys, values = (part.repeat_interleave(groups, 3) for part in (keys, values))
    q, k, v = (part.flatten(0, 1).transpose(1, 2) for part in (blocks, keys, values))
    return grid.from_blocks(attention(q, k, v, scale=1.0).transpose(1, 2).unflatten(0, blocks.shape[:2]))


def boundaries(seen: torch.Tensor, window: int) -> tuple[bool, bool]:
    """Whether the next token of some sequence is the first of its document, and whether one is the last of its block.
    Both are True where reading the values would synchronise with the device.

    Args:
        seen: (B,) int64, tokens so far.
        window: W.
    """
    if not can_read_values(seen):
        return True, True
    ranks = seen.tolist()
    return 0 in ranks, any(rank % window == window - 1 for rank in ranks)


class MultiFilterMixin:
    """What `ContextStates` has for "mf" alone; the attributes declared here are that class's."""

    window: int
    variant: str
    ssm: nn.Module
    initial_context: nn.Parameter
    context_ids: nn.Parameter
    named_states: Callable[[MixerState | None, torch.Tensor, torch.Tensor], States]
    _ssm_input: Callable[[torch.Tensor], torch.Tensor]
    _project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    _maps_are_plain: Callable[[], bool]

    def add_contexts(self, count: int, hidden_size: int) -> None:
        """(S, d) each: the states of a document's first block, and what tells the states of a block apart."""
        self.initial_context = nn.Parameter(torch.empty(count, hidden_size))
        self.context_ids = nn.Parameter(torch.empty(count, hidden_size))

    def set_initial_values(self) -> None:
        if self.variant == "mf":
            init.normal_(self.initial_context, std=INITIAL_STD)
            init.normal_(self.context_ids, std=ID_STD)

    def _attend_by_block(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, rows: Rows, head_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, States]:
        """`ContextStates.forward` of any number of tokens."""
        grid = block_grid(x, self.window, past, rows)
        keys, values, after = self.by_block(x, grid, past, rows)
        return attend_blocks(queries, keys, values, grid, head_scale), after

    def by_block(
        self, x: torch.Tensor, grid: BlockGrid, past: States, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, States]:
        """Keys and values (B, J, S, H, e) of the blocks that the tokens touch, and the state after them.
        C_0 is learned, C_i = y at the last token of block i - 1, the only outputs computed."""
        first = None
        selection: dict[str, Any] = {"stride": self.window}
        if grid.block is not None:
            first, selection = grid.is_first_block[..., None, None], {"positions": grid.ends}
        options = {"rows": rows, "initial_state": mixer_state(past), **selection}
        y, ssm = self.ssm(self._ssm_input(x), **options)  # (B, J or L // W, S, d)
        initial = self.initial_context.to(y.dtype).expand(x.shape[0], 1, -1, -1)
        y = y if first is None else torch.where(first[:, 1:], initial, y)
        contexts: tuple[torch.Tensor, ...] = self._project(torch.cat([initial, y], dim=1))
        if past and first is not None:  # a cache need not hold zeros before the end of the first block
            context = (past[name].transpose(1, 2).unsqueeze(1) for name in CONTEXT)
            starts = (torch.where(first[:, :1, None], new[:, :1], old) for new, old in zip(contexts, context))
            contexts = tuple(torch.cat([start, new[:, 1:]], 1) for start, new in zip(starts, contexts))
        after = {}
        if rows.return_final_state:
            index = torch.arange(x.shape[0], device=x.device)
            after = self.named_states(ssm, *(part[index, grid.next_block].transpose(1, 2) for part in contexts))
        keys, values = (part[:, : grid.num_blocks] for part in contexts)
        return keys, values, after

    def _attend_multi_filter_token(
        self, queries: torch.Tensor, u: torch.Tensor, past: States, rows: Rows, **scales: Any
    ) -> tuple[torch.Tensor, States]:
        """`forward` of a step: as of `ContextStates._attend_token`. The context stays the same within a block: only a
        block's first and last token change it."""
        context, seen = [past[name] for name in CONTEXT], past["seen"]
        begins, ends = boundaries(seen, self.window)
        if begins:  # a cache need not hold zeros before the first block of a document
            fresh = (seen == 0).view(-1, 1, 1, 1)
            initial = self._initial(queries.shape[0])
            context = [torch.where(fresh, new.transpose(-3, -2), old) for new, old in zip(initial, context)]
        attended = slot_attention(queries, None, None, *context, **scales)
        y, ssm = self.ssm(u, rows=rows, initial_state=mixer_state(past), stride=1 if ends else 2)
        if not ends:
            return attended, self.named_states(ssm, *context)
        over = (seen % self.window == self.window - 1).view(-1, 1, 1, 1)
        new = (part.squeeze(1).transpose(1, 2) for part in self._project(y))
        after = (torch.where(over, part.to(old.dtype), old) for part, old in zip(new, context))
        return attended, self.named_states(ssm, *after)

    def _initial(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ([B,] S, H, e) of the learned context of a document's first block: once for all rows, unless
        the maps are wrapped, as by adapters that differ from row to row."""
        initial = self.initial_context
        return self._project(initial if self._maps_are_plain() else initial.expand(batch, -1, -1))
