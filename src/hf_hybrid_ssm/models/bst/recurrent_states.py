"""The state of a Block-Recurrent Transformer layer (arXiv 2203.07852): vectors, read and rewritten once a block.

The cell is the paper's with a fixed gate and no feed-forward layer on the state side ("fixed:skip"), the baseline of
Block-State Transformers.
"""

from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.layers.offloaded import with_accelerate_hooks
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.block_grid import BlockGrid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import boundaries, l2_normalise
from hf_hybrid_ssm.ops._core.checks import can_read_values
from hf_hybrid_ssm.ops._core.transforms import attention
from hf_hybrid_ssm.ops.attention_step import attention_step

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
        self, token_keys: torch.Tensor, token_values: torch.Tensor, grid: BlockGrid, state: States | None
    ) -> tuple[torch.Tensor, torch.Tensor, States]:
        """Keys and values of the state for each block that a piece touches, and the state after the piece.

        Args:
            token_keys, token_values: (B, L, H, e).
            grid: the blocks of the piece.
            state: the tensors `RECURRENT_STATES` after the tokens before the piece, or None.

        Returns:
            keys and values (B, J, S, H, e), and the new state.
        """
        held = None if state is None else (state["block_key"], state["block_value"])
        blocks = [
            grid.to_blocks(part, None if held is None else held[index])
            for index, part in enumerate((token_keys, token_values))
        ]
        before = [torch.zeros_like(part[:, 0]) for part in blocks]
        if state is not None:
            before = [state["before_key"], state["before_value"]]
        befores: list[list[torch.Tensor]] = [[], []]
        initial = self.initial_state.expand(token_keys.shape[0], -1, -1)
        s = initial if state is None else state["recurrent"]
        states, keys, values = [], [], []
        finished_blocks = grid.num_blocks if self._last_block_may_be_finished(grid) else grid.num_blocks - 1
        for j in range(grid.num_blocks + 1):
            first = grid.is_first_block[:, j, None, None]
            s = torch.where(first, initial, s)
            states.append(s)
            for index in range(2):
                befores[index].append(torch.where(first.unsqueeze(-1), 0.0, before[index]))
            cached = None
            if j == 0 and state is not None:
                cached = state["context_key"], state["context_value"], first.unsqueeze(-1)
            r, k, v = self._read(s, cached)
            keys.append(k)
            values.append(v)
            if j < finished_blocks:
                token = [torch.cat([befores[i][j], blocks[i][:, j]], 1) for i in range(2)]
                s = self._update(s, r, k, v, *token)
            if j < grid.num_blocks:
                before = [part[:, j] for part in blocks]
        after = self._after(grid, states, keys, values, befores, blocks)
        return torch.stack(keys[:-1], 1), torch.stack(values[:-1], 1), after

    @with_accelerate_hooks
    def step(
        self, queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: States, **scales: Any
    ) -> tuple[torch.Tensor, States]:
        """One token of each row after earlier ones, without gradients; the tensors of `state` are overwritten.

        Args:
            queries: (B, H, e), not yet scaled.
            key, value: (B, H, e), the token's.
            state: the tensors `RECURRENT_STATES`, and `seen` (B,), the tokens before this one.
            scales: `scale` and `head_scale` of `attention_step`.

        Returns:
            What the token finds (B, H, e), and the state after it.
        """
        s, keys, values, *blocks, old_key, old_value = (state[name] for name in RECURRENT_STATES)
        seen, window = state["seen"], state["block_key"].shape[1]
        begins, ends = boundaries(seen, window)
        if begins:  # a cache may hold zeros before the first block of a document
            fresh = (seen == 0).view(-1, 1, 1)
            s = torch.where(fresh, self.initial_state, s)
            new = self._keys_and_values(self.initial_state.unsqueeze(0))
            keys, values = (torch.where(fresh.unsqueeze(-1), n, old) for n, old in zip(new, (keys, values)))
        found = attention_step(queries, None, None, keys.transpose(1, 2), values.transpose(1, 2), **scales)
        slot = (seen % window).view(-1, 1, 1, 1)
        for block, token in zip(blocks, (key, value)):
            block.scatter_(1, slot.expand(-1, 1, *block.shape[2:]), token.to(block.dtype).unsqueeze(1))
        before = [old_key, old_value]
        if ends:
            over = slot == window - 1
            tokens = (torch.cat([old, block], 1) for old, block in zip(before, blocks))
            after = self._after_block(s, keys, values, *tokens).to(s.dtype)
            s, new = torch.where(over[..., 0], after, s), self._keys_and_values(after)
            keys, values = (torch.where(over, part, old) for part, old in zip(new, (keys, values)))
            before = [torch.where(over, block, old) for block, old in zip(blocks, before)]
            blocks = [block.masked_fill(over, 0.0) for block in blocks]
        return found, dict(zip(RECURRENT_STATES, (s, keys, values, *blocks, *before)))

    def _keys_and_values(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """s (B, S, d) → (B, S, H, e) each."""
        _, keys, values = self._read(s, None)
        return keys, values

    def _after_block(
        self,
        s: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        token_keys: torch.Tensor,
        token_values: torch.Tensor,
    ) -> torch.Tensor:
        """The states after a block that began with s, whose keys and values are given."""
        return self._update(s, self.norm(s) + self.state_ids, keys, values, token_keys, token_values)

    def _last_block_may_be_finished(self, grid: BlockGrid) -> bool:
        """False where no row finishes the last block, so that the update after it may be left out."""
        return not can_read_values(grid.next_block) or bool((grid.next_block >= grid.num_blocks).any())

    def _read(
        self, s: torch.Tensor, cached: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """s (B, S, d) → r (B, S, d), keys and values (B, S, H, e), taken from the cache where that holds them."""
        r = self.norm(s) + self.state_ids
        keys, values = (layer(r).unflatten(-1, (self.num_heads, -1)) for layer in (self.k_proj, self.v_proj))
        keys = keys if self.scale is None else l2_normalise(keys)
        if cached is not None:
            keys, values = (torch.where(cached[2], new, old) for new, old in zip((keys, values), cached))
        return r, keys, values

    def _update(
        self,
        s: torch.Tensor,
        r: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        token_keys: torch.Tensor,
        token_values: torch.Tensor,
    ) -> torch.Tensor:
        itself = self._attend(self.q_proj(r), self.scale, keys, values)
        tokens = self._attend(self.token_q_proj(r), self.token_scale, token_keys, token_values)
        gate = self.gate.sigmoid()
        return gate * s + (1 - gate) * self.o_proj(torch.cat([itself, tokens], -1))

    def _attend(
        self, queries: torch.Tensor, scale: torch.Tensor | None, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """(B, S, H e), (B, M, H, e) twice → (B, S, H e), without a mask."""
        q = queries.unflatten(-1, (self.num_heads, -1))
        factor = None
        if scale is not None:
            q, factor = l2_normalise(q) * scale.abs().to(q.dtype).unsqueeze(1), 1.0
        q, k, v = (part.transpose(1, 2) for part in (q, keys, values))
        return attention(q, k, v, scale=factor).transpose(1, 2).flatten(2)

    def _after(
        self,
        grid: BlockGrid,
        states: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        befores: list[list[torch.Tensor]],
        blocks: list[torch.Tensor],
    ) -> States:
        """The state of the block that goes on after the piece, of each row."""
        rows = torch.arange(states[0].shape[0], device=states[0].device)
        taken = (torch.stack(parts, 1)[rows, grid.next_block] for parts in (states, keys, values))
        unfinished = (grid.unfinished(part) for part in blocks)
        before = (torch.stack(parts, 1)[rows, grid.next_block] for parts in befores)
        return dict(zip(RECURRENT_STATES, (*taken, *unfinished, *before)))
