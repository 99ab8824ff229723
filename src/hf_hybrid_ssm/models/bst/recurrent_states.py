"""The state of a Block-Recurrent Transformer layer (arXiv 2203.07852): vectors, read and rewritten once a block.

The cell is the paper's with a fixed gate and no feed-forward layer on the state side ("fixed:skip"), the baseline of
Block-State Transformers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from hf_hybrid_ssm.layers.l2_normalise import l2_normalise
from hf_hybrid_ssm.layers.offloaded import with_accelerate_hooks
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.block_grid import BlockGrid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import boundaries
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import is_autocast_enabled
from hf_hybrid_ssm.ops.local_attention import slot_attention

States = dict[str, torch.Tensor]
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
        self.num_heads = num_heads
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

    def forward(
        self,
        token_keys: torch.Tensor,
        token_values: torch.Tensor,
        grid: BlockGrid,
        state: States | None,
        *,
        return_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, States]:
        """Keys and values of the state for each block that the tokens touch, and the state after the tokens.

        Args:
            token_keys, token_values: (B, L, H, e).
            grid: the blocks of the tokens.
            state: the tensors `RECURRENT_STATES` after earlier tokens, or None.
            return_state: also return the state after the tokens; else it is empty.

        Returns:
            keys and values (B, J, S, H, e), and the new state.
        """
        starts_anew = grid.block is None and not return_state  # then only block 0 is the first of a document
        blocks, befores = [], []
        if starts_anew:
            tokens = [_windows(part, grid).unbind(1) for part in (token_keys, token_values)]
        else:
            for part, name in ((token_keys, "key"), (token_values, "value")):
                held = (None, None) if state is None else (state[f"block_{name}"], state[f"before_{name}"])
                blocks.append(grid.to_blocks(part, held[0]))
                befores.append(_blocks_before(blocks[-1], held[1], grid.is_first_block))
            pairs = zip(befores, blocks)
            tokens = [torch.cat([before[:, :-1], block], 2).unbind(1) for before, block in pairs]
        initial = self.initial_state.expand(token_keys.shape[0], -1, -1)
        s = initial if state is None else state["recurrent"]
        states, keys, values = [], [], []
        updates = grid.num_blocks - 1
        if return_state and self._last_block_may_be_finished(grid):
            updates = grid.num_blocks
        project, scales, blend = self._projection(), self._scales(), self._blending()
        for j in range(grid.num_blocks + return_state):
            first = None if starts_anew else grid.is_first_block[:, j, None, None]
            s = s if first is None else torch.where(first, initial, s)
            states.append(s)
            k, v, *queries = self._read(s, project, scales)
            if j == 0 and state is not None:  # what the block began with; the state may have been rounded since
                held = state["context_key"], state["context_value"]
                k, v = (torch.where(first.unsqueeze(-1), new, old) for new, old in zip((k, v), held))
            keys.append(k)
            values.append(v)
            if j < updates:
                s = self._update(s, queries, (k, v), (tokens[0][j], tokens[1][j]), blend)
        after = self._after(grid, states, keys, values, befores, blocks) if return_state else {}
        count = grid.num_blocks
        return torch.stack(keys[:count], 1), torch.stack(values[:count], 1), after

    @with_accelerate_hooks
    def attend_one_token(
        self,
        queries: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        state: States,
        rows: Rows,
        *,
        scale: float | None,
        head_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, States]:
        """A step: cross-attention of one token of each sequence to the states of its block.

        Args:
            queries: (B, H, 1, e), not yet scaled.
            key, value: (B, 1, H, e), the token's.
            state: the tensors `RECURRENT_STATES`, and `seen` (B,), the tokens before this one.
            rows: of a step.
            scale, head_scale: as of `slot_attention`.

        Returns:
            The cross-attention's output (B, H, 1, e), and the state after the token.
        """
        s, keys, values, *blocks, old_key, old_value = (state[name] for name in RECURRENT_STATES)
        seen, window = state["seen"], state["block_key"].shape[1]
        begins, ends = boundaries(seen, window)
        if begins:  # a cache may hold zeros before the first block of a document
            fresh = (seen == 0).view(-1, 1, 1)
            s = torch.where(fresh, self.initial_state, s)
            # once for all rows, unless the maps are wrapped, as by adapters that differ from row to row
            is_shared = all(map(_is_plain, self._projected_by()))
            initial = self.initial_state.expand(1 if is_shared else s.shape[0], -1, -1)
            new = self._read(initial, self._projection(), self._scales())
            keys, values = (torch.where(fresh.unsqueeze(-1), n, old) for n, old in zip(new, (keys, values)))
        by_head = (keys.transpose(1, 2), values.transpose(1, 2))
        found = slot_attention(queries, None, None, *by_head, scale=scale, head_scale=head_scale)
        slot = (seen % window).view(-1, 1, 1, 1)
        blocks = blocks if rows.overwrites_states else [block.clone() for block in blocks]
        for block, token in zip(blocks, (key, value)):
            block.scatter_(1, slot.expand(-1, 1, *block.shape[2:]), token.to(block.dtype))
        before = [old_key, old_value]
        if ends:
            over = slot == window - 1
            token_keys, token_values = (torch.cat([old, block], 1) for old, block in zip(before, blocks))
            project, scales_of_state = self._projection(), self._scales()
            _, _, *state_queries = self._read(s, project, scales_of_state)
            rewritten = self._update(s, state_queries, (keys, values), (token_keys, token_values), self._blending())
            s = torch.where(over[..., 0], rewritten.to(s.dtype), s)
            new = self._read(s, project, scales_of_state)
            keys, values = (torch.where(over, n, old) for n, old in zip(new, (keys, values)))
            before = [torch.where(over, block, old) for block, old in zip(blocks, before)]
            blocks = [block.masked_fill(over, 0.0) for block in blocks]
        return found, dict(zip(RECURRENT_STATES, (s, keys, values, *blocks, *before)))

    def _last_block_may_be_finished(self, grid: BlockGrid) -> bool:
        """False where no sequence finishes the last block, so that the update after it may be left out."""
        return not can_read_values(grid.next_block) or bool((grid.next_block >= grid.num_blocks).any())

    def _projected_by(self) -> tuple[nn.Module, ...]:
        return self.k_proj, self.q_proj, self.token_q_proj, self.v_proj

    def _projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """(B, S, d) → (B, S, 4 H e): keys, both queries, values, as one product where the four maps are plain."""
        layers = self._projected_by()
        if all(map(_is_plain, layers)):
            weight = torch.cat([layer.weight for layer in layers])
            return lambda r: F.linear(r, weight)
        return lambda r: torch.cat([layer(r) for layer in layers], -1)

    def _blending(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """s (B, S, d) and its attention's output (B, S, 2 H e) → g s + (1 - g) W output, the product and the sum in
        one."""
        gate = self.gate.sigmoid()
        if not _is_plain(self.o_proj) or is_autocast_enabled(gate.device.type):
            return lambda s, found: gate * s + (1 - gate) * self.o_proj(found)
        weight = ((1 - gate).unsqueeze(1) * self.o_proj.weight).T
        return lambda s, found: torch.addmm((gate * s).flatten(0, 1), found.flatten(0, 1), weight).view_as(s)

    def _scales(self) -> torch.Tensor | None:
        """(3, H, 1), of keys and both queries."""
        if self.scale is None or self.token_scale is None:
            return None
        return torch.stack([torch.ones_like(self.scale), self.scale.abs(), self.token_scale.abs()]).unsqueeze(-1)

    def _read(
        self, s: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor], scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """s (B, S, d) → keys, values and both queries (B, S, H, e)."""
        parts = project(self.norm(s) + self.state_ids).unflatten(-1, (4, self.num_heads, -1))
        compared, values = parts.split([3, 1], 2)
        if scales is not None:
            compared = l2_normalise(compared) * scales.to(parts.dtype)
        keys, queries, token_queries = compared.unbind(2)
        return keys, values.squeeze(2), queries, token_queries

    def _update(
        self,
        s: torch.Tensor,
        queries: list[torch.Tensor],
        own: tuple[torch.Tensor, torch.Tensor],
        of_tokens: tuple[torch.Tensor, torch.Tensor],
        blend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The states after a block, from keys and values of their own and of the tokens."""
        found = (self._attend(q, keys, values) for q, (keys, values) in zip(queries, (own, of_tokens)))
        return blend(s, torch.cat([*found], -1))

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(B, S, H, e), (B, M, H, e) twice → (B, S, H e), without a mask."""
        q, k, v = (part.transpose(1, 2) for part in (queries, keys, values))
        return attention(q, k, v, scale=None if self.scale is None else 1.0).transpose(1, 2).flatten(2)

    def _after(
        self,
        grid: BlockGrid,
        states: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        befores: list[torch.Tensor],
        blocks: list[torch.Tensor],
    ) -> States:
        """The state of the block that the next token continues, of each sequence."""
        rows = torch.arange(states[0].shape[0], device=states[0].device)
        taken = (torch.stack(parts, 1)[rows, grid.next_block] for parts in (states, keys, values))
        unfinished = (grid.unfinished(part) for part in blocks)
        before = (part[rows, grid.next_block] for part in befores)
        return dict(zip(RECURRENT_STATES, (*taken, *unfinished, *before)))


def _is_plain(layer: nn.Module) -> bool:
    """A layer that is wrapped (LoRA, quantization), hooked (offloading) or sharded is called as any module."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not is_hooked


def _windows(x: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """x (B, L, H, e) → (B, J, 2 W, H, e), each block after the one before it, and block 0 after zeros."""
    gap = grid.num_blocks * grid.window - grid.length
    padded = F.pad(x, (0, 0, 0, 0, grid.window, gap))
    return padded.unfold(1, 2 * grid.window, grid.window).permute(0, 1, 4, 2, 3)


def _blocks_before(blocks: torch.Tensor, held: torch.Tensor | None, is_first: torch.Tensor) -> torch.Tensor:
    """(B, J + 1, W, H, e) the block before each of blocks (B, J, W, H, e) and before the one after them; before block
    0 the one that is held (B, W, H, e), and zeros before the first of a document."""
    held = torch.zeros_like(blocks[:, 0]) if held is None else held.to(blocks.dtype)
    before = torch.cat([held.unsqueeze(1), blocks], 1)
    return torch.where(is_first[..., None, None, None], 0.0, before)
