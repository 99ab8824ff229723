# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 265fab02456811624f3143b145e85beaa3e8379dcefd6f9d7cdc85a48d0943cf

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_bst import BstConfig
from .dispatch import attention, can_read_values
from .layers import RMSNorm, RelativeBias, l2_normalise
from .local_attention import AttentionState, attention_step, local_attention, window_step
from .mixers import State, mixer_from_config, mixer_state, named_states, with_accelerate_hooks
from .model_parts import States, rotated


# ---- models/bst/block_grid.py ---------------------------------------------------------------------------------------
# Where the tokens of a piece lie in the blocks of W tokens that every document is cut into.
#
# Blocks count from the first token of a document, wherever a piece of it begins and whatever else its packed row holds.
# In a fresh batch, blocks are simply a reshape.

class BlockGrid(ABC):
    """The blocks 0..J-1 that a piece (B, L) touches, and block J after them.

    Attributes:
        window: W.
        length: L.
        num_blocks: J.
        starts: (B, J + 1) int64, column of each block's first token; negative where the block began in an earlier
            piece. Blocks that a row does not have start at L.
        is_first_block: (B, J + 1) bool, the block is the first of its document.
        tokens_seen: (B,) int64, tokens of the row's last document read so far, this piece included.
        next_block: (B,) int64, the block of the token that follows the piece.
        real: (B,) int64, real tokens of the piece.
    """

    window: int
    length: int
    num_blocks: int
    starts: torch.Tensor
    is_first_block: torch.Tensor
    tokens_seen: torch.Tensor
    next_block: torch.Tensor
    real: torch.Tensor

    @property
    def slot_mask(self) -> torch.Tensor:
        """(B, J, W) the slot holds a real token of this piece."""
        columns = self.starts[:, :-1, None] + torch.arange(self.window, device=self.starts.device)
        ends = torch.minimum(self.starts[:, 1:], self.real.unsqueeze(1))
        return (columns >= 0) & (columns < ends.unsqueeze(-1))

    @abstractmethod
    def to_blocks(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, L, ...) → (B, J, W, ...), slot by slot.

        `past` (B, W, ...) fills the slots of block 0 that earlier pieces hold. Slots after a document's end hold
        something finite.
        """

    @abstractmethod
    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """(B, J, W, ...) → (B, L, ...)."""

    def unfinished(self, blocks: torch.Tensor) -> torch.Tensor:
        """From (B, J, W, ...) the block that goes on after the piece, (B, W, ...), zero where it is not yet
        filled."""
        last = self.next_block.clamp(max=self.num_blocks - 1)
        rows = torch.arange(blocks.shape[0], device=blocks.device)
        filled = torch.arange(self.window, device=blocks.device) < (self.tokens_seen % self.window).unsqueeze(1)
        kept = blocks[rows, last]
        return torch.where(_like(filled, kept), kept, 0.0)


@dataclass(frozen=True)
class AlignedGrid(BlockGrid):
    """The grid of rows of one document that begin at a block's first token: a reshape, which needs no tensor.

    Args:
        window, length: W, L.
        lengths: (B,) int, real tokens at the front of each row; or None.
        batch: B.
        device: of the tensors, which are made where they are asked for.
    """

    window: int
    length: int
    lengths: torch.Tensor | None
    batch: int
    device: torch.device | None

    @property
    def num_blocks(self) -> int:  # type: ignore[override]
        return -(-self.length // self.window)

    @property
    def starts(self) -> torch.Tensor:  # type: ignore[override]
        starts = torch.arange(self.num_blocks + 1, device=self.device) * self.window
        return starts.expand(self.batch, -1)

    @property
    def is_first_block(self) -> torch.Tensor:  # type: ignore[override]
        return self.starts == 0

    @property
    def tokens_seen(self) -> torch.Tensor:  # type: ignore[override]
        return self.real

    @property
    def next_block(self) -> torch.Tensor:  # type: ignore[override]
        return self.real // self.window

    @property
    def real(self) -> torch.Tensor:  # type: ignore[override]
        if self.lengths is not None:
            return self.lengths.to(torch.int64)
        return torch.full((self.batch,), self.length, device=self.device)

    def to_blocks(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        if past is not None:
            raise ValueError("past must be None: aligned rows have no earlier piece.")
        gap = self.num_blocks * self.window - self.length
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, gap)) if gap else x
        return x.unflatten(1, (self.num_blocks, self.window))

    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.flatten(1, 2)[:, : self.length]


@dataclass(frozen=True)
class FreeGrid(BlockGrid):
    """The grid of rows whose blocks begin anywhere.

    Args:
        block: (B, L) int64, the block of each token; the others as in `BlockGrid`.
    """

    window: int
    length: int
    starts: torch.Tensor
    is_first_block: torch.Tensor
    block: torch.Tensor
    tokens_seen: torch.Tensor
    next_block: torch.Tensor
    real: torch.Tensor

    @property
    def num_blocks(self) -> int:  # type: ignore[override]
        return self.starts.shape[1] - 1

    @property
    def ends(self) -> torch.Tensor:
        """(B, J) column of the token before each of the blocks 1..J (where that is in this piece)."""
        return (self.starts[:, 1:] - 1).clamp(0, self.length - 1)

    def to_blocks(self, x: torch.Tensor, past: torch.Tensor | None = None) -> torch.Tensor:
        slots = torch.arange(self.window, device=x.device)
        columns = (self.starts[:, :-1, None] + slots).clamp(0, self.length - 1)
        blocks = _take(x, columns.flatten(1)).unflatten(1, columns.shape[1:])
        if past is None:
            return blocks
        offset = (-self.starts[:, 0]).clamp(min=0)  # tokens of block 0 that earlier pieces hold
        held = _like((slots < offset.unsqueeze(1)), past)
        return torch.cat([torch.where(held, past, blocks[:, 0]).unsqueeze(1), blocks[:, 1:]], dim=1)

    def from_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        slot = torch.arange(self.length, device=blocks.device) - self.starts.gather(1, self.block)
        return _take(blocks.flatten(1, 2), self.block * self.window + slot)


def block_grid(
    batch: int,
    length: int,
    window: int,
    *,
    tokens_seen: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    documents: int | None = None,
    device: torch.device | None = None,
) -> AlignedGrid | FreeGrid:
    """The grid of a piece.

    Args:
        tokens_seen: (B,) int64, tokens of each row's first document that earlier pieces hold; None: none do.
        seq_idx: (B, L) int, documents of packed rows; padding belongs to the last one.
        lengths: (B,) int, real tokens at the front of each row.
        documents: the most that a row of `seq_idx` holds, where its values are not to be read.
    """
    if seq_idx is None and tokens_seen is None:
        return AlignedGrid(window, length, lengths, batch, device)
    columns = torch.arange(length, device=device)
    real = torch.full((batch,), length, device=device) if lengths is None else lengths.to(torch.int64)
    before = torch.zeros(batch, dtype=torch.int64, device=device) if tokens_seen is None else tokens_seen
    if seq_idx is not None:
        return _packed_grid(length, window, columns, before, real, seq_idx, documents)
    offset = before % window
    indices = torch.arange((length + window - 2) // window + 2, device=device)
    return FreeGrid(
        window=window,
        length=length,
        starts=indices * window - offset.unsqueeze(1),
        is_first_block=(before // window).unsqueeze(1) + indices == 0,
        block=(columns + offset.unsqueeze(1)) // window,
        tokens_seen=before + real,
        next_block=(offset + real) // window,
        real=real,
    )


def positions_in_documents(columns: torch.Tensor, before: torch.Tensor, seq_idx: torch.Tensor) -> torch.Tensor:
    """(B, L) int64, the tokens before each token in its document.

    Args:
        columns: 0 … L - 1.
        before, seq_idx: `tokens_seen` and `seq_idx` of `block_grid`.
    """
    begins = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=False)
    return columns - torch.where(begins, columns, -before.unsqueeze(1)).cummax(1).values


def _packed_grid(
    length: int,
    window: int,
    columns: torch.Tensor,
    before: torch.Tensor,
    real: torch.Tensor,
    seq_idx: torch.Tensor,
    documents: int | None,
) -> FreeGrid:
    """Every document restarts the blocks, so their number depends on where documents begin.

    Where that costs a wait for the device, there are as many blocks as that number of documents can have.
    """
    position = positions_in_documents(columns, before, seq_idx)
    slot = position % window
    opens = slot == 0
    opens[:, 0] = True
    block = opens.cumsum(1) - 1
    if documents is None or can_read_values(block):
        num_blocks = int(block.max()) + 1
    else:
        num_blocks = length // window + documents + 1
    starts = torch.full((seq_idx.shape[0], num_blocks + 1), length, device=columns.device)
    starts = starts.scatter(1, block, columns - slot)
    first = torch.zeros_like(starts, dtype=torch.bool).scatter(1, block, position < window)
    last = (real - 1).clamp(min=0).unsqueeze(1)
    tokens_seen = torch.where(real > 0, position.gather(1, last).squeeze(1) + 1, before)
    next_block = block.gather(1, last).squeeze(1) + (tokens_seen % window == 0)
    next_block = torch.where(real > 0, next_block, 0)
    return FreeGrid(window, length, starts, first, block, tokens_seen, next_block, real)


def _take(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """x (B, L, ...) at columns (B, M) → (B, M, ...)."""
    index = columns.view(*columns.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, index)


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """mask (B, W) with the trailing dimensions of x (B, W, ...)."""
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


# ---- models/bst/retrieval.py ----------------------------------------------------------------------------------------
# Attention to a block's context states and, with them, to the best of many older ones: a memory without gradient.
#
# The outlook of Block-State Transformers, after Memorizing Transformers (arXiv 2203.08913): each layer keeps the last M
# context states of finished blocks, and a token's query takes the k that fit it best into its softmax.

retrieval_States = dict[str, torch.Tensor]
MEMORY_STATES = ("memory_key", "memory_value", "memory_count")


def attend_with_memory(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    grid: BlockGrid,
    state: retrieval_States | None,
    *,
    causal: str | None,
    top_k: int,
    capacity: int,
    stride: int,
) -> tuple[torch.Tensor, retrieval_States]:
    """Cross-attention of every block's tokens to its own context states and the retrieved ones, one softmax over both.

    Args:
        queries: (B, J, W, H, e), scaled.
        keys, values: (B, J, W or S, H, e), the context states of the blocks of a piece.
        grid: the blocks.
        state: the tensors `MEMORY_STATES` after the tokens before the piece, or None.
        causal: "causal", "strict" or None, which of its block's own states a token sees, as for `attend_context`.
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
    own = _own_mask(window, keys.shape[2], causal, queries.device)
    found = []
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
        weights = torch.where(joint.isneginf().all(-1, keepdim=True), 0.0, joint).softmax(-1)
        weights = weights.masked_fill(joint.isneginf(), 0.0)  # a token that sees nothing finds nothing
        found.append((weights @ torch.cat([v, memory_value], 2)).transpose(1, 2))
        finished = j < grid.next_block  # (B,) this row has read the block to its end
        memory_key = _pushed(memory_key, k[:, :, stride - 1 :: stride], finished)
        memory_value = _pushed(memory_value, v[:, :, stride - 1 :: stride], finished)
        count = torch.where(finished, (count + k[:, :, stride - 1 :: stride].shape[2]).clamp(max=capacity), count)
    # the block after the piece may begin a new document, whose memory is empty
    rows = torch.arange(batch, device=queries.device)
    count = torch.where(grid.is_first_block[rows, grid.next_block], 0, count)
    return torch.stack(found, 1), dict(zip(MEMORY_STATES, (memory_key, memory_value, count)))


def _own_mask(window: int, slots: int, causal: str | None, device: torch.device) -> torch.Tensor | None:
    if causal is None:
        return None
    return torch.ones(window, slots, dtype=torch.bool, device=device).tril(0 if causal == "causal" else -1)


def _pushed(memory: torch.Tensor, new: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """(B, H, M, e) with the states of a finished block after the others; never a way back for gradients."""
    after = torch.cat([memory, new.detach().to(memory.dtype)], 2)[:, :, -memory.shape[2] :]
    return torch.where(finished[:, None, None, None], after, memory)


# ---- models/bst/context_states.py -----------------------------------------------------------------------------------
# Context states: what a block of the Block-State Transformer knows of everything before it.
#
# A state-space model runs over the whole row; its outputs, cut into blocks, become keys and values that the tokens of
# the block attend to (section 3 of the paper):
#
#     "sh"  one filter; block i owns its outputs y_s of the same block, seen causally, by all heads
#     "mh"  a filter for each key/value head; its queries see the outputs of this filter only
#     "mf"  S filters; block i owns their outputs at the last token of block i - 1, and block 0 learned states

def boundaries(seen: torch.Tensor, window: int) -> tuple[bool, bool]:
    """Whether some row's next token is the first of its document, and the last of its block; where that is not known
    without a wait for the device, it may be.

    Args:
        seen: (B,) int64, tokens so far.
        window: W.
    """
    if not can_read_values(seen):
        return True, True
    ranks = seen.tolist()
    return 0 in ranks, any(rank % window == window - 1 for rank in ranks)


class HeadwiseLinear(nn.Module):
    """One matrix for each head: (..., H, D) → (..., H, head_dim), without bias."""

    def __init__(self, num_heads: int, in_features: int, head_dim: int):
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(num_heads, in_features, head_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...hd,hde->...he", x, self.weight)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(("heads", "in", "out"), self.weight.shape))


class ContextStates(nn.Module):
    """The state-space model of a layer (`ssm_type`), and the keys and values that its outputs become.

    Of the configuration, `num_context_states` is S of "mf"; `ssm_input_norm` normalises the input of the state-space
    model, and `qk_norm` or `use_qk_norm` the keys. H is here the number of key/value heads, G of the attention.
    """

    def __init__(self, config: BstConfig):
        super().__init__()
        hidden_size, num_heads, head_dim = config.hidden_size, config.num_key_value_heads, config.head_dim
        eps, variant = config.layer_norm_epsilon, config.context_variant
        filters = {"sh": None, "mh": num_heads, "mf": config.num_context_states}[variant]
        self.num_heads, self.head_dim, self.window = num_heads, head_dim, config.sliding_window
        self.variant, self.qk_norm = variant, config.qk_norm
        self.input_norm = RMSNorm(hidden_size, eps=eps) if config.ssm_input_norm else None
        self.ssm = mixer_from_config(config, bidirectional=config.bidirectional, filters=filters)
        self.norm = RMSNorm(hidden_size, eps=eps)
        if variant == "mh":
            self.k_proj: nn.Module = HeadwiseLinear(num_heads, hidden_size, head_dim)
            self.v_proj: nn.Module = HeadwiseLinear(num_heads, hidden_size, head_dim)
        else:
            self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=config.attention_bias)
            self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=config.attention_bias)
        self.k_norm = RMSNorm(head_dim, eps=eps) if config.use_qk_norm else None
        if variant == "mf":
            self.initial_context = nn.Parameter(torch.empty(config.num_context_states, hidden_size))
            self.context_ids = nn.Parameter(torch.empty(config.num_context_states, hidden_size))

    def forward(
        self, x: torch.Tensor, grid: AlignedGrid | FreeGrid, state: dict[str, torch.Tensor] | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Keys and values of the blocks that a piece touches.

        Args:
            x: (B, L, d), the layer's input.
            grid: the blocks of the piece.
            state: the tensors that an earlier call returned, or None.
            options: `seq_idx`, `lengths` and `return_final_state`, as for every mixer.

        Returns:
            keys and values (B, J, W or S, H, e), and the state, empty if it was not asked for.
        """
        past = (None, None) if not state else (state["context_key"], state["context_value"])
        if self.variant == "mf":
            return self._shifted(x, grid, past, options | {"initial_state": mixer_state(state or {})})
        *parts, ssm = self.along_rows(x, state, **options)
        keys, values = (
            grid.to_blocks(part, None if held is None else held.transpose(1, 2)) for part, held in zip(parts, past)
        )
        after = {}
        if options["return_final_state"]:
            unfinished = (grid.unfinished(part).transpose(1, 2) for part in (keys, values))
            after = self.named_states(ssm, *unfinished)
        return keys, values, after

    def along_rows(
        self, x: torch.Tensor, state: dict[str, torch.Tensor] | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, State | None]:
        """As `forward` for "sh" and "mh", but token by token: keys and values (B, L, H, e), and the state of the
        state-space model. No shape depends on where the blocks of documents begin."""
        y, ssm = self.ssm(self._ssm_input(x), initial_state=mixer_state(state or {}), **options)
        return *self._project(y), ssm

    def _ssm_input(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_norm is None else self.input_norm(x)

    def _shifted(
        self,
        x: torch.Tensor,
        grid: AlignedGrid | FreeGrid,
        past: tuple[torch.Tensor | None, torch.Tensor | None],
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """C_0 learned, C_i = y at the last token of block i - 1: read out there only, all filters at once."""
        first = None
        selection: dict[str, Any] = {"stride": self.window}
        if isinstance(grid, FreeGrid):
            first, selection = grid.is_first_block[..., None, None], {"positions": grid.ends}
        y, ssm = self.ssm(self._ssm_input(x), **options, **selection)  # (B, J or L // W, S, d)
        initial = self.initial_context.to(y.dtype).expand(len(x), 1, -1, -1)
        y = y if first is None else torch.where(first[:, 1:], initial, y)
        contexts = self._project(torch.cat([initial, y], dim=1))
        if past[0] is not None:  # before the first block is over, a cache may hold anything
            held = (part.transpose(1, 2).unsqueeze(1) for part in past)
            starts = (torch.where(first[:, :1, None], new[:, :1], old) for new, old in zip(contexts, held))
            contexts = tuple(torch.cat([start, new[:, 1:]], 1) for start, new in zip(starts, contexts))
        after = {}
        if options["return_final_state"]:
            rows = torch.arange(len(x), device=x.device)
            after = self.named_states(ssm, *(part[rows, grid.next_block].transpose(1, 2) for part in contexts))
        keys, values = (part[:, : grid.num_blocks] for part in contexts)
        return keys, values, after

    @with_accelerate_hooks
    def step(
        self, queries: torch.Tensor, x: torch.Tensor, state: dict[str, torch.Tensor], *, right: int, **scales: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One token of each row after earlier ones, without gradients; the tensors of `state` are overwritten.

        Args:
            queries: (B, heads, e), not yet scaled; H divides their number.
            x: (B, d), the layer's input.
            state: as in `forward`, with the tokens before this one, `seen` (B,).
            right: 0 if the token sees its own slot, else -1.
            scales: `scale` and `head_scale` of `attention_step`.

        Returns:
            What the token finds (B, heads, e), and the state after it.
        """
        u = self._ssm_input(x)
        held, seen = (state["context_key"], state["context_value"]), state["seen"]
        if self.variant == "mf":
            return self._shifted_step(queries, u, state, **scales)
        y, ssm = self.ssm.step_(u, mixer_state(state))
        z = self.norm(y)
        k, v = (layer(z).view(len(x), self.num_heads, self.head_dim) for layer in (self.k_proj, self.v_proj))
        if self.k_norm is not None:  # a step normalises to length 1 itself
            k = self.k_norm(k).to(v.dtype)
        found = attention_step(queries, k, v, *held, seen, window=(None, right), block=True, **scales)
        return found, self.named_states(ssm, *held)

    def _shifted_step(
        self, queries: torch.Tensor, u: torch.Tensor, state: dict[str, torch.Tensor], **scales: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The context stays the same within a block: where the ranks can be read, little is left to do."""
        held, seen = [state["context_key"], state["context_value"]], state["seen"]
        begins, ends = boundaries(seen, self.window)
        if begins:  # a cache may hold anything before the first block of a document
            fresh = (seen == 0).view(-1, 1, 1, 1)
            held = [torch.where(fresh, new.transpose(0, 1), old) for new, old in zip(self._initial(), held)]
        found = attention_step(queries, None, None, *held, **scales)
        if not ends:
            return found, self.named_states(self.ssm.advance_(u, mixer_state(state)), *held)
        y, ssm = self.ssm.step_(u, mixer_state(state))
        over = (seen % self.window == self.window - 1).view(-1, 1, 1, 1)
        after = (torch.where(over, new.transpose(1, 2).to(old.dtype), old) for new, old in zip(self._project(y), held))
        return found, self.named_states(ssm, *after)

    def _initial(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (S, H, e) of the learned context of a document's first block."""
        return self._project(self.initial_context)

    def _project(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """SSM outputs (..., [H or S,] d) → keys and values (..., [S,] H, e)."""
        z = self.norm(y)
        if self.variant == "mf":
            z = z + self.context_ids
        if self.variant == "mh":
            keys, values = self.k_proj(z), self.v_proj(z)
        else:
            flat = z.flatten(0, -2)  # once for both; bitsandbytes' 8-bit linear layers take at most three dimensions
            heads = (*z.shape[:-1], self.num_heads, self.head_dim)
            keys, values = self.k_proj(flat).view(heads), self.v_proj(flat).view(heads)
        if self.k_norm is not None:
            return self.k_norm(keys).to(values.dtype), values  # under autocast the norm is float32
        return (l2_normalise(keys) if self.qk_norm else keys), values

    @staticmethod
    def named_states(ssm: State | None, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """What later pieces need: of the state-space model, and keys and values (B, H, W or S, e) of the block."""
        return {**named_states(ssm), "context_key": keys, "context_value": values}


def newest_last(slots: torch.Tensor, tokens_seen: torch.Tensor) -> torch.Tensor:
    """(B, H, W, e) of the slots of an unfinished block of rows that hold tokens_seen (B,) → the same with the newest
    in the last place, as `AttentionState` has them."""
    return _rolled(slots, -tokens_seen)


def slot_by_slot(newest: torch.Tensor, tokens_seen: torch.Tensor) -> torch.Tensor:
    """The inverse of `newest_last`, zero in slots that are not yet filled."""
    window = newest.shape[2]
    filled = torch.arange(window, device=newest.device) < (tokens_seen % window).unsqueeze(1)
    return torch.where(filled[:, None, :, None], _rolled(newest, tokens_seen), 0.0)


def _rolled(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x (B, H, W, e), each row moved on by shift (B,) places, around the end."""
    window = x.shape[2]
    source = (torch.arange(window, device=x.device) - shift.unsqueeze(1)) % window
    return x.gather(2, source[:, None, :, None].expand_as(x))


def attend_context(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: str | torch.Tensor | None,
) -> torch.Tensor:
    """Cross-attention of a block's tokens to its context states; scores are already scaled.

    Args:
        queries: (B, J, W, H, e).
        keys, values: (B, J, W or S, H, e).
        mask: "causal" (slot s sees slots up to s), "strict" (slots before s; slot 0 sees nothing and gets 0), None, or
            a boolean (B, J, W), the slots that all may see.

    Returns:
        (B, J, W, H, e).
    """
    batch, blocks = queries.shape[:2]
    q, k, v = (part.flatten(0, 1).transpose(1, 2) for part in (queries, keys, values))
    options: dict[str, Any] = {"scale": 1.0}
    if isinstance(mask, torch.Tensor):
        options["attn_mask"] = (mask | ~mask.any(-1, keepdim=True)).flatten(0, 1)[:, None, None]
    elif mask == "strict":
        strict = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(-1)
        strict[0, 0] = True
        options["attn_mask"] = strict
    elif mask == "causal":
        options["is_causal"] = True
    out = attention(q, k, v, **options).transpose(1, 2).unflatten(0, (batch, blocks))
    if isinstance(mask, str) and mask == "strict":
        out = torch.cat([torch.zeros_like(out[:, :, :1]), out[:, :, 1:]], dim=2)
    return out


# ---- models/bst/recurrent_states.py ---------------------------------------------------------------------------------
# The state of a Block-Recurrent Transformer layer (arXiv 2203.07852): vectors, read and rewritten once a block.
#
# The cell is the paper's with a fixed gate and no feed-forward layer on the state side ("fixed:skip"), the baseline of
# Block-State Transformers.

recurrent_states_States = dict[str, torch.Tensor]
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
        grid: AlignedGrid | FreeGrid,
        state: recurrent_states_States | None,
        *,
        return_state: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, recurrent_states_States]:
        """Keys and values of the state for each block that a piece touches, and the state after the piece.

        Args:
            token_keys, token_values: (B, L, H, e).
            grid: the blocks of the piece.
            state: the tensors `RECURRENT_STATES` after the tokens before the piece, or None.
            return_state: also return the state after the piece; else it is empty.

        Returns:
            keys and values (B, J, S, H, e), and the new state.
        """
        starts_anew = (
            isinstance(grid, AlignedGrid) and not return_state
        )  # then only block 0 is the first of a document
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
    def step(
        self, queries: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: recurrent_states_States, **scales: Any
    ) -> tuple[torch.Tensor, recurrent_states_States]:
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
            new = self._read(self.initial_state.unsqueeze(0), self._projection(), self._scales())
            keys, values = (torch.where(fresh.unsqueeze(-1), n, old) for n, old in zip(new, (keys, values)))
        found = attention_step(queries, None, None, keys.transpose(1, 2), values.transpose(1, 2), **scales)
        slot = (seen % window).view(-1, 1, 1, 1)
        for block, token in zip(blocks, (key, value)):
            block.scatter_(1, slot.expand(-1, 1, *block.shape[2:]), token.to(block.dtype).unsqueeze(1))
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

    def _last_block_may_be_finished(self, grid: AlignedGrid | FreeGrid) -> bool:
        """False where no row finishes the last block, so that the update after it may be left out."""
        return not can_read_values(grid.next_block) or bool((grid.next_block >= grid.num_blocks).any())

    def _projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """(B, S, d) → (B, S, 4 H e): keys, both queries, values, as one product where the four maps are plain."""
        layers = (self.k_proj, self.q_proj, self.token_q_proj, self.v_proj)
        if all(_is_plain(layer) for layer in layers):
            weight = torch.cat([layer.weight for layer in layers])
            return lambda r: F.linear(r, weight)
        return lambda r: torch.cat([layer(r) for layer in layers], -1)

    def _blending(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """s (B, S, d) and what it found (B, S, 2 H e) → g s + (1 - g) W found, the product and the sum as one."""
        gate = self.gate.sigmoid()
        if not _is_plain(self.o_proj) or torch.is_autocast_enabled(gate.device.type):
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
        grid: AlignedGrid | FreeGrid,
        states: list[torch.Tensor],
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        befores: list[torch.Tensor],
        blocks: list[torch.Tensor],
    ) -> recurrent_states_States:
        """The state of the block that goes on after the piece, of each row."""
        rows = torch.arange(states[0].shape[0], device=states[0].device)
        taken = (torch.stack(parts, 1)[rows, grid.next_block] for parts in (states, keys, values))
        unfinished = (grid.unfinished(part) for part in blocks)
        before = (part[rows, grid.next_block] for part in befores)
        return dict(zip(RECURRENT_STATES, (*taken, *unfinished, *before)))


def _is_plain(layer: nn.Module) -> bool:
    """A layer that is wrapped (LoRA, quantization), hooked (offloading) or sharded is called as any module."""
    is_hooked = layer._forward_hooks or layer._forward_pre_hooks or hasattr(layer, "_hf_hook")
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and not is_hooked


def _windows(x: torch.Tensor, grid: AlignedGrid | FreeGrid) -> torch.Tensor:
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


# ---- models/bst/attention.py ----------------------------------------------------------------------------------------
# Attention of a Block-State Transformer layer: to the window, and to context states or recurrent states.

PositionEmbeddings = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (B or 1, L, e) of rotary positions."""


class BstAttention(nn.Module):
    """Attention to the W tokens before; beside it, in a "bst" layer to the context states of the block, in a
    "block_recurrent" layer to its recurrent states.

    Queries and keys are L2-normalised; each head has a learned scale, and T5's bias lies inside it, as in the token
    branch of Block-Recurrent Transformers (arXiv 2203.07852), whose official code has it so. With `rope_parameters`
    the queries and keys of tokens are rotated instead of biased; `num_key_value_heads` G below H are shared by H / G
    queries each.
    """

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.num_heads, self.head_dim, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.qk_norm, self.dropout = config.qk_norm, config.attention_dropout
        self.is_bidirectional = config.bidirectional
        self.right = config.sliding_window if config.bidirectional else 0 if config.attend_self else -1
        self.zero_kv_sink = config.zero_kv_sink and not config.bidirectional
        bias, eps, shared = config.attention_bias, config.layer_norm_epsilon, inner // self.groups
        self.q_proj = nn.Linear(width, inner, bias=bias)
        self.k_proj = nn.Linear(width, shared, bias=bias)
        self.v_proj = nn.Linear(width, shared, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.relative_bias: RelativeBias | None = None
        if config.rope_parameters is None:
            self.relative_bias = RelativeBias(
                self.num_heads,
                config.relative_attention_num_buckets,
                config.relative_attention_max_distance,
                bidirectional=config.bidirectional,
            )
        self.scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        self.context: ContextStates | None = None
        self.recurrent: RecurrentStates | None = None
        block_type = config.block_types[layer_idx]
        if block_type == "bst":
            self.context = ContextStates(config)
            self.retrieval: dict[str, int] | None = None
            if config.retrieval_k is not None:
                self.retrieval = {"top_k": config.retrieval_k, "capacity": config.retrieval_memory}
                self.retrieval["stride"] = config.retrieval_stride
            inclusive = "causal" if config.cross_attention_inclusive else "strict"
            self.context_mask = None if config.context_variant == "mf" else inclusive
        elif block_type == "block_recurrent":
            self.recurrent = RecurrentStates(config)
        if block_type != "sliding_attention":
            self.context_q_proj = nn.Linear(width, inner, bias=bias)
            self.context_q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
            self.context_scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        self.o_proj = nn.Linear(inner if block_type == "sliding_attention" else 2 * inner, width, bias=bias)

    def forward(
        self,
        z: torch.Tensor,
        x: torch.Tensor,
        past: States,
        *,
        documents: int | None = None,
        position_embeddings: PositionEmbeddings | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d) normalised and raw inputs, the states before them → (B, L, d), the states after them.

        Args:
            documents: as of `block_grid`.
            position_embeddings: cosines and sines (B or 1, at least L, e) of rotary positions.
            options: as of `RecurrentMixin.mix`.
        """
        q, k, v = self._heads(z)
        bias = None if self.relative_bias is None else self.relative_bias(self.window)
        if self.scale is not None:
            scale = self.scale.abs().to(q.dtype).unsqueeze(1)
            q, k, bias = l2_normalise(q) * scale, l2_normalise(k), None if bias is None else bias * scale
        unrotated = k
        if position_embeddings is not None:
            cos, sin = (part[:, : z.shape[1]] for part in position_embeddings)  # rollback replays fewer tokens
            q, k = rotated(q, k, (cos, sin), v.dtype)
        y, state = local_attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            window=(self.window, self.right),
            bias=bias,
            scale=1.0 if self.qk_norm else None,
            zero_kv_sink=self.zero_kv_sink,
            dropout=self.dropout if self.training else 0.0,
            initial_state=AttentionState(*(past[name] for name in AttentionState._fields)) if past else None,
            **options,
        )
        y = y.transpose(1, 2)
        states: States = {} if state is None else state._asdict()
        if self.context is not None:
            crossed, more = self._attend_context(z, x, past, documents=documents, **options)
        elif self.recurrent is not None:
            of_tokens = self._for_every_query(unrotated, v)
            crossed, more = self._attend_recurrent(z, *of_tokens, past, documents=documents, **options)
        else:
            return self.o_proj(y.flatten(2)), states
        return self.o_proj(torch.cat([y.flatten(2), crossed.flatten(2)], dim=2)), states | more

    def _heads(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, L, H, e), keys and values (B, L, G, e)."""
        q, k, v = (layer(z).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:  # under autocast they are float32
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return q, k, v

    def _for_every_query(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., G, e) → (..., H, e)."""
        if self.groups == 1:
            return keys, values
        return keys.repeat_interleave(self.groups, -2), values.repeat_interleave(self.groups, -2)

    def _attend_context(
        self, z: torch.Tensor, x: torch.Tensor, past: States, *, documents: int | None = None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """(B, L, H, e) what the tokens find in the context states of their blocks (equations 3.3 and 3.4)."""
        queries = self._context_queries(z)
        if (past or options["seq_idx"] is not None) and self.context_mask is not None and self.retrieval is None:
            return self._attend_context_along_rows(queries, x, past, options)
        grid = self._grid(x, past, documents, options)
        keys, values, states = self.context(x, grid, past or None, **options)
        keys, values = self._for_every_query(keys, values)
        if self.retrieval is not None:
            blocks = grid.to_blocks(queries)
            found, memory = attend_with_memory(
                blocks, keys, values, grid, past or None, causal=self.context_mask, **self.retrieval
            )
            return grid.from_blocks(found), states | memory if options["return_final_state"] else {}
        mask = grid.slot_mask if self.is_bidirectional else self.context_mask
        blocks = attend_context(grid.to_blocks(queries), keys, values, mask=mask)
        return grid.from_blocks(blocks), states

    def _attend_context_along_rows(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, options: dict[str, Any]
    ) -> tuple[torch.Tensor, States]:
        """The same where blocks begin anywhere: a block's tokens and its states are the same columns of the row."""
        keys, values, ssm = self.context.along_rows(x, past or None, **options)
        state = None
        if past:
            held = [newest_last(past[name], past["seen"]) for name in ("context_key", "context_value")]
            state = AttentionState(held[0], held[1], past["seen"])
        right = self.window - 1 if self.is_bidirectional else 0 if self.context_mask == "causal" else -1
        y, after = local_attention(
            *(part.transpose(1, 2) for part in (queries, keys, values)),
            window=(self.window - 1, right),
            chunk_size=self.window,
            scale=1.0,
            initial_state=state,
            capacity=self.window,
            **options,
        )
        states: States = {}
        if after is not None:
            unfinished = (slot_by_slot(part, after.seen) for part in (after.keys, after.values))
            states = self.context.named_states(ssm, *unfinished)
        return y.transpose(1, 2), states

    def _attend_recurrent(
        self,
        z: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        past: States,
        *,
        documents: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, States]:
        """(B, L, H, e) what the tokens find in the state their block began with."""
        grid = self._grid(z, past, documents, options)
        return_state = options["return_final_state"]
        state_keys, state_values, after = self.recurrent(keys, values, grid, past or None, return_state=return_state)
        blocks = attend_context(grid.to_blocks(self._context_queries(z)), state_keys, state_values, mask=None)
        return grid.from_blocks(blocks), after

    def _grid(
        self, x: torch.Tensor, past: States, documents: int | None, options: dict[str, Any]
    ) -> AlignedGrid | FreeGrid:
        """Where the tokens of x (B, L, d) lie in the blocks of their documents."""
        packing = {name: options[name] for name in ("seq_idx", "lengths")} | {"documents": documents}
        seen, device = past.get("seen"), x.device
        return block_grid(x.shape[0], x.shape[1], self.window, tokens_seen=seen, device=device, **packing)

    def _context_queries(self, z: torch.Tensor) -> torch.Tensor:
        """(B, L, H, e), scaled."""
        queries = self._context_heads(z)
        if self.context_scale is None:
            return queries * self.head_dim**-0.5
        return l2_normalise(queries) * self.context_scale.abs().to(queries.dtype).unsqueeze(1)

    def _context_heads(self, z: torch.Tensor) -> torch.Tensor:
        """The same before the scale."""
        queries = self.context_q_proj(z).unflatten(2, (self.num_heads, -1))
        return queries if self.context_q_norm is None else self.context_q_norm(queries).to(queries.dtype)

    @with_accelerate_hooks
    def step(
        self,
        z: torch.Tensor,
        x: torch.Tensor,
        past: States,
        *,
        keeps_address: bool,
        position_embeddings: PositionEmbeddings | None = None,
    ) -> tuple[torch.Tensor, States]:
        """`forward` of one token (B, 1, d) after earlier ones, without gradients; `past` is overwritten."""
        q, k, v = self._heads(z)
        states, crossed = dict(past), None
        scales: dict[str, Any] = {"scale": 1.0 if self.qk_norm else None}
        if self.context is not None:
            queries, right = self._context_heads(z)[:, 0], 0 if self.context_mask == "causal" else -1
            crossed, more = self.context.step(
                queries, x[:, 0], past, right=right, head_scale=self.context_scale, **scales
            )
            states |= more
        elif self.recurrent is not None:
            key, value = self._for_every_query(k if self.scale is None else l2_normalise(k), v)
            queries = self._context_heads(z)[:, 0]
            crossed, more = self.recurrent.step(
                queries, key[:, 0], value[:, 0], past, head_scale=self.context_scale, **scales
            )
            states |= more
        if position_embeddings is not None:
            q, k = rotated(q, k, position_embeddings, v.dtype)
        y, state = window_step(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            AttentionState(past["keys"], past["values"], past["seen"]),
            keeps_address=keeps_address,
            window=(self.window, self.right),
            bias=None if self.relative_bias is None else self.relative_bias(self.window),
            head_scale=self.scale,
            zero_kv_sink=self.zero_kv_sink,
            **scales,
        )
        y = y if crossed is None else torch.cat([y.flatten(1), crossed.flatten(1)], 1)
        return self.o_proj(y.flatten(1).unsqueeze(1)), states | state._asdict()
