"""The state of a Block-Recurrent Transformer layer (arXiv 2203.07852): vectors, read and rewritten once a block.

The cell is the paper's with a fixed gate and no feed-forward layer on the state side ("fixed:skip"), the baseline of
Block-State Transformers.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.block_states import ID_STD, INITIAL_STD, BlockGrid, attend_blocks, block_grid, boundaries
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import is_autocast_enabled
from hf_hybrid_ssm.ops.local_attention import slot_attention

# of the block that the next token continues: the state vectors, their keys and values, and keys and values of its
# tokens so far and of the block before it
RECURRENT_STATES = (
    "recurrent", "context_key", "context_value", "block_key", "block_value", "before_key", "before_value",
)  # fmt: skip


class RecurrentStates(nn.Module):
    """S state vectors: keys and values that the tokens of a block attend to, and their update at its end.

    With r_i = norm(s_i) + ids and keys, values and two queries from r_i (keys and queries L2-normalised, a learned
    scale per head on each query):

        v_i     = W [attention(q_i, state keys, state values) ; attention(q'_i, token keys, token values)]
        s_{i+1} = g s_i + (1 - g) v_i,      g = sigmoid(b)

    Tokens are those of block i and of the one before, without a mask; before a document's first block lie zeros.

    Of the configuration, `recurrent_num_states` is S; with `qk_norm` keys and queries are L2-normalised and have
    learned scales, otherwise the scale is 1 / sqrt(e).
    """

    def __init__(self, config: BstConfig):
        super().__init__()
        hidden_size, num_heads, num_states = (
            config.hidden_size,
            config.num_attention_heads,
            config.recurrent_num_states,
        )
        inner = num_heads * config.head_dim
        self.num_heads, self.window = num_heads, config.sliding_window
        self.initial_state = nn.Parameter(torch.empty(num_states, hidden_size))
        self.state_ids = nn.Parameter(torch.empty(num_states, hidden_size))
        self.norm = RMSNorm(hidden_size, eps=config.layer_norm_epsilon)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.token_q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(2 * inner, hidden_size, bias=False)
        self.gate = nn.Parameter(torch.empty(hidden_size))
        self.scale = nn.Parameter(torch.ones(num_heads)) if config.qk_norm else None
        self.token_scale = nn.Parameter(torch.ones(num_heads)) if config.qk_norm else None

    def set_initial_values(self) -> None:
        init.normal_(self.initial_state, std=INITIAL_STD)
        init.normal_(self.state_ids, std=ID_STD)
        init.normal_(self.gate, std=0.1)
        for scale in (self.scale, self.token_scale):
            if scale is not None:
                init.ones_(scale)

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        past: States,
        rows: Rows,
        *,
        head_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, States]:
        """Cross-attention of tokens to the state at the start of their blocks.

        Args:
            queries: (B, L, H, e), not yet scaled.
            keys, values: (B, L, H, e), the tokens'; keys as the update attends to them.
            past, rows: as of `RecurrentMixin.forward_rows`; `past` has `seen` (B,) besides what an earlier call
                returned.
            head_scale: as of `scaled_queries`.

        Returns:
            (B, L, H, e), and `RECURRENT_STATES` after the tokens, empty if they were not asked for.
        """
        if rows.is_step and past:
            return self._attend_token(queries, keys, values, past, rows, head_scale)
        batch, wants_state = keys.shape[0], rows.return_final_state
        grid = block_grid(keys, self.window, past, rows)
        # without a cache and without packing only block 0 is the first of a document
        is_alone = grid.block is None and not wants_state
        if is_alone:
            tokens = _windows(keys, grid), _windows(values, grid)
        else:
            held = ((past.get(f"block_{name}"), past.get(f"before_{name}")) for name in ("key", "value"))
            tokens, blocks, before = zip(*(_by_block(x, grid, *old) for x, old in zip((keys, values), held)))
        updates = grid.num_blocks if wants_state and self._may_finish_last_block(grid) else grid.num_blocks - 1
        cell, initial = _Cell(self), self.initial_state.expand(batch, -1, -1)
        s, reads = past.get("recurrent", initial), []
        for j in range(grid.num_blocks + wants_state):
            begins = None if is_alone else grid.is_first_block[:, j, None, None]
            read = cell.read(s if begins is None else torch.where(begins, initial, s))
            if j == 0 and past and begins is not None:
                read = read.continued(begins, past)
            reads.append(read)
            s = cell.update(read, tokens[0][j], tokens[1][j]) if j < updates else read.s
        state_keys, state_values = (
            torch.stack([read[part] for read in reads[: grid.num_blocks]], 1) for part in (1, 2)
        )
        attended = attend_blocks(queries, state_keys, state_values, grid, head_scale)
        if not wants_state:
            return attended, {}
        index = torch.arange(batch, device=keys.device), grid.next_block  # the block that each sequence goes on with
        taken = (torch.stack(parts, 1)[index] for parts in list(zip(*reads))[:3])
        unfinished = (grid.unfinished(part) for part in blocks)
        return attended, dict(zip(RECURRENT_STATES, (*taken, *unfinished, *(part[index] for part in before))))

    def _attend_token(
        self,
        queries: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        past: States,
        rows: Rows,
        head_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, States]:
        """`forward` of a step: a block's first token reads the state, and its last one updates it."""
        s, keys, values, *blocks, old_key, old_value = (past[name] for name in RECURRENT_STATES)
        seen, window = past["seen"], self.window
        begins, ends = boundaries(seen, window)
        cell = _Cell(self) if begins or ends else None
        if cell is not None and begins:  # a cache may hold zeros before the first block of a document
            fresh = (seen == 0).view(-1, 1, 1)
            s = torch.where(fresh, self.initial_state, s)
            # once for all rows, unless the maps are wrapped, as by adapters that differ from row to row
            new = cell.read(self.initial_state.expand(1 if cell.weight is not None else s.shape[0], -1, -1))
            keys = torch.where(fresh.unsqueeze(-1), new.keys, keys)
            values = torch.where(fresh.unsqueeze(-1), new.values, values)
        by_head = queries.transpose(1, 2), None, None, keys.transpose(1, 2), values.transpose(1, 2)
        attended = slot_attention(*by_head, scale=None if head_scale is None else 1.0, head_scale=head_scale)
        slot = (seen % window).view(-1, 1, 1, 1)
        blocks = blocks if rows.overwrites_states else [block.clone() for block in blocks]
        for block, token in zip(blocks, (key, value)):
            block.scatter_(1, slot.expand(-1, 1, *block.shape[2:]), token.to(block.dtype))
        before = [old_key, old_value]
        if cell is not None and ends:
            over = slot == window - 1
            tokens = (torch.cat([old, block], 1) for old, block in zip(before, blocks))
            after = cell.update(cell.read(s)._replace(keys=keys, values=values), *tokens)
            s = torch.where(over[..., 0], after.to(s.dtype), s)
            new = cell.read(s)
            keys, values = torch.where(over, new.keys, keys), torch.where(over, new.values, values)
            before = [torch.where(over, block, old) for block, old in zip(blocks, before)]
            blocks = [block.masked_fill(over, 0.0) for block in blocks]
        return attended.transpose(1, 2), dict(zip(RECURRENT_STATES, (s, keys, values, *blocks, *before)))

    def _may_finish_last_block(self, grid: BlockGrid) -> bool:
        """False where no sequence finishes the last block, so that the update after it may be left out."""
        return not can_read_values(grid.next_block) or bool((grid.next_block >= grid.num_blocks).any())


class _Read(NamedTuple):
    """The states (B, S, d) at the start of a block, and what is read of them, (B, S, H, e) each."""

    s: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    token_queries: torch.Tensor

    def continued(self, begins: torch.Tensor, past: States) -> "_Read":
        """With the keys and values that the block began with in an earlier forward: the state may have been rounded
        since. begins (B, 1, 1): it begins here."""
        begins = begins.unsqueeze(-1)
        keys = torch.where(begins, self.keys, past["context_key"])
        return self._replace(keys=keys, values=torch.where(begins, self.values, past["context_value"]))


class _Cell:
    """The maps of `RecurrentStates`, made ready once for all blocks of a forward: plain ones become one product."""

    def __init__(self, maps: RecurrentStates):
        self.maps = maps
        self.projections = maps.k_proj, maps.q_proj, maps.token_q_proj, maps.v_proj
        weights: list[Any] = [layer.weight for layer in self.projections if _is_plain(layer)]
        self.weight = torch.cat(weights) if len(weights) == len(self.projections) else None
        self.gate = maps.gate.sigmoid()
        self.blending = None
        if _is_plain(maps.o_proj) and not is_autocast_enabled(self.gate.device.type):
            self.blending = ((1 - self.gate).unsqueeze(1) * maps.o_proj.weight).T
        self.scales = None  # (3, H, 1), of keys and both queries
        if maps.scale is not None and maps.token_scale is not None:
            scales = torch.ones_like(maps.scale), maps.scale.abs(), maps.token_scale.abs()
            self.scales = torch.stack(scales).unsqueeze(-1)

    def read(self, s: torch.Tensor) -> _Read:
        maps = self.maps
        r = maps.norm(s) + maps.state_ids
        projected = (
            torch.cat([layer(r) for layer in self.projections], -1)
            if self.weight is None
            else F.linear(r, self.weight)
        )
        parts = projected.unflatten(-1, (4, maps.num_heads, -1))
        compared, values = parts.split([3, 1], 2)
        if self.scales is not None:
            compared = l2_normalise(compared) * self.scales.to(parts.dtype)
        keys, queries, token_queries = compared.unbind(2)
        return _Read(s, keys, values.squeeze(2), queries, token_queries)

    def update(self, read: _Read, token_keys: torch.Tensor, token_values: torch.Tensor) -> torch.Tensor:
        """The states (B, S, d) after a block, from their own keys and values and those of tokens (B, M, H, e)."""
        own = self._attend(read.queries, read.keys, read.values)
        of_tokens = self._attend(read.token_queries, token_keys, token_values)
        attended, kept = torch.cat([own, of_tokens], -1), self.gate * read.s
        if self.blending is None:
            return kept + (1 - self.gate) * self.maps.o_proj(attended)
        return torch.addmm(kept.flatten(0, 1), attended.flatten(0, 1), self.blending).view_as(read.s)

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(B, S, H, e), (B, M, H, e) twice → (B, S, H e), without a mask."""
        q, k, v = (part.transpose(1, 2) for part in (queries, keys, values))
        return attention(q, k, v, scale=None if self.scales is None else 1.0).transpose(1, 2).flatten(2)


def _is_plain(layer: nn.Module) -> bool:
    """A layer that is wrapped (LoRA, quantization), hooked (offloading) or sharded is called as any module."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not is_hooked


def _windows(x: torch.Tensor, grid: BlockGrid) -> tuple[torch.Tensor, ...]:
    """x (B, L, H, e) of new rows → for each of J blocks its tokens after those of the block before it, (B, 2 W, H, e);
    block 0 after zeros."""
    gap = grid.num_blocks * grid.window - grid.length
    padded = F.pad(x, (0, 0, 0, 0, grid.window, gap))
    return padded.unfold(1, 2 * grid.window, grid.window).permute(0, 1, 4, 2, 3).unbind(1)


def _by_block(
    x: torch.Tensor, grid: BlockGrid, block: torch.Tensor | None, before: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """`_windows` of any rows, after what is held of block 0 and of the block before it, (B, W, H, e) each; the blocks
    (B, J, W, H, e); and the block before each of them and before the next one (B, J + 1, W, H, e), zeros before the
    first of a document."""
    blocks = grid.to_blocks(x, block)
    old = torch.zeros_like(blocks[:, 0]) if before is None else before.to(blocks.dtype)
    befores = torch.cat([old.unsqueeze(1), blocks], 1)
    befores = torch.where(grid.is_first_block[..., None, None, None], 0.0, befores)
    return torch.cat([befores[:, :-1], blocks], 2).unbind(1), blocks, befores
