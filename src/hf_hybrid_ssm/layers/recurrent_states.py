"""The state of a Block-Recurrent Transformer layer (arXiv 2203.07852): vectors, read and rewritten once a block.

The cell is the paper's with a fixed gate and no feed-forward layer on the state side ("fixed:skip"), the baseline of
Block-State Transformers.
"""

import torch
from torch import nn

from hf_hybrid_ssm.layers.block_grid import BlockGrid
from hf_hybrid_ssm.layers.context_states import l2_normalise
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.ops._core.checks import can_read_values
from hf_hybrid_ssm.ops._core.transforms import attention

States = dict[str, torch.Tensor]
NAMES = ("recurrent", "context_key", "context_value", "block_key", "block_value", "before_key", "before_value")


class RecurrentStates(nn.Module):
    """S state vectors: keys and values that the tokens of a block attend to, and their update at its end.

    With r_i = norm(s_i) + ids and keys, values and two queries from r_i (keys and queries L2-normalised, a learned
    scale a head on each query):

        v_i     = W [attention(q_i, state keys, state values) ; attention(q'_i, token keys, token values)]
        s_{i+1} = g s_i + (1 - g) v_i,      g = sigmoid(b)

    Tokens are those of block i and of the one before, without a mask; before a document's first block lie zeros.

    Args:
        hidden_size, num_heads, head_dim: d, H, e.
        window: W, tokens of a block.
        num_states: S.
        qk_norm: L2-normalised keys and queries with learned scales; otherwise the scale is 1 / sqrt(e).
        eps: of the norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        window: int,
        num_states: int,
        qk_norm: bool = True,
        eps: float = 1e-6,
    ):
        super().__init__()
        inner = num_heads * head_dim
        self.num_heads, self.head_dim, self.window, self.num_states = num_heads, head_dim, window, num_states
        self.initial_state = nn.Parameter(torch.empty(num_states, hidden_size))
        self.state_ids = nn.Parameter(torch.empty(num_states, hidden_size))
        self.norm = RMSNorm(hidden_size, eps=eps)
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.token_q_proj = nn.Linear(hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(2 * inner, hidden_size, bias=False)
        self.gate = nn.Parameter(torch.empty(hidden_size))
        self.scale = nn.Parameter(torch.ones(num_heads)) if qk_norm else None
        self.token_scale = nn.Parameter(torch.ones(num_heads)) if qk_norm else None

    def forward(
        self, token_keys: torch.Tensor, token_values: torch.Tensor, grid: BlockGrid, state: States | None
    ) -> tuple[torch.Tensor, torch.Tensor, States]:
        """Keys and values of the state for each block that a piece touches, and the state after the piece.

        Args:
            token_keys, token_values: (B, L, H, e).
            grid: the blocks of the piece.
            state: the tensors `NAMES` after the tokens before the piece, or None.

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
        every, keys, values = [], [], []
        rows_over = grid.number if self._last_block_is_over(grid) else grid.number - 1
        for j in range(grid.number + 1):
            first = grid.first[:, j, None, None]
            s = torch.where(first, initial, s)
            every.append(s)
            for index in range(2):
                befores[index].append(torch.where(first.unsqueeze(-1), 0.0, before[index]))
            cached = None
            if j == 0 and state is not None:
                cached = state["context_key"], state["context_value"], first.unsqueeze(-1)
            r, k, v = self._read(s, cached)
            keys.append(k)
            values.append(v)
            if j < rows_over:
                token = [torch.cat([befores[i][j], blocks[i][:, j]], 1) for i in range(2)]
                s = self._update(s, r, k, v, *token)
            if j < grid.number:
                before = [part[:, j] for part in blocks]
        after = self._after(grid, every, keys, values, befores, blocks)
        return torch.stack(keys[:-1], 1), torch.stack(values[:-1], 1), after

    def _last_block_is_over(self, grid: BlockGrid) -> bool:
        """False where no row finishes the last block, so that the update behind it may be left out."""
        return not can_read_values(grid.following) or bool((grid.following >= grid.number).any())

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
        every: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        befores: list[list[torch.Tensor]],
        blocks: list[torch.Tensor],
    ) -> States:
        """The state of the block that goes on behind the piece, of each row."""
        rows = torch.arange(every[0].shape[0], device=every[0].device)
        taken = (torch.stack(parts, 1)[rows, grid.following] for parts in (every, keys, values))
        unfinished = (grid.unfinished(part) for part in blocks)
        before = (torch.stack(parts, 1)[rows, grid.following] for parts in befores)
        return dict(zip(NAMES, (*taken, *unfinished, *before)))
