"""Context states of the variant "mf", S for each block: they stay the same for all of its tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from hf_hybrid_ssm.layers.mixers.base import MixerState, mixer_state
from hf_hybrid_ssm.models.bst.block_grid import ID_STD, INITIAL_STD, BlockGrid, attend_blocks, block_grid, boundaries
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import slot_attention

CONTEXT = ("context_key", "context_value")
"""The names of what a layer keeps of a block, (B, H, W or S, e) each."""


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
