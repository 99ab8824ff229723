"""Context states: what a block of the Block-State Transformer knows of everything before it.

A state-space model runs over the whole row; its outputs, cut into blocks, become keys and values that the tokens of
the block attend to (section 3 of the paper):

    "sh"  one filter; block i owns its outputs y_s of the same block, seen causally, by all heads
    "mh"  a filter for each head; head h sees the outputs of its own filter only
    "mf"  S filters; block i owns their outputs at the last token of block i - 1, and block 0 learned states
"""

from typing import Any

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.base import State, mixer_state, named_states
from hf_hybrid_ssm.layers.mixers.registry import mixer_from_config
from hf_hybrid_ssm.layers.offloaded import with_accelerate_hooks
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.bst.block_grid import BlockGrid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.ops._core.checks import can_read_values
from hf_hybrid_ssm.ops._core.transforms import attention
from hf_hybrid_ssm.ops.attention_step import attention_step


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) over the last dimension, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


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
    model, and `qk_norm` the keys.
    """

    def __init__(self, config: BstConfig):
        super().__init__()
        hidden_size, num_heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        eps, variant = config.layer_norm_epsilon, config.context_variant
        filters = {"sh": None, "mh": num_heads, "mf": config.num_context_states}[variant]
        self.num_heads, self.head_dim, self.window = num_heads, head_dim, config.sliding_window
        self.variant, self.key_norm = variant, config.qk_norm
        self.input_norm = RMSNorm(hidden_size, eps=eps) if config.ssm_input_norm else None
        self.ssm = mixer_from_config(config, bidirectional=config.bidirectional, filters=filters)
        self.norm = RMSNorm(hidden_size, eps=eps)
        if variant == "mh":
            self.k_proj: nn.Module = HeadwiseLinear(num_heads, hidden_size, head_dim)
            self.v_proj: nn.Module = HeadwiseLinear(num_heads, hidden_size, head_dim)
        else:
            self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
            self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        if variant == "mf":
            self.initial_context = nn.Parameter(torch.empty(config.num_context_states, hidden_size))
            self.context_ids = nn.Parameter(torch.empty(config.num_context_states, hidden_size))

    def forward(
        self,
        x: torch.Tensor,
        grid: BlockGrid,
        *,
        state: dict[str, torch.Tensor] | None = None,
        seq_idx: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        return_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Keys and values of the blocks that a piece touches.

        Args:
            x: (B, L, d), the layer's input.
            grid: the blocks of the piece.
            state: the tensors that an earlier call returned, or None.
            seq_idx, lengths: as for every mixer.
            return_state: also return the state after the piece; else it is empty.

        Returns:
            keys and values (B, J, W or S, H, e), and the state.
        """
        u = x if self.input_norm is None else self.input_norm(x)
        past = (None, None) if not state else (state["context_key"], state["context_value"])
        options: dict[str, Any] = {
            "initial_state": None if not state else mixer_state(state),
            "seq_idx": seq_idx,
            "lengths": lengths,
            "return_final_state": return_state,
        }
        if self.variant == "mf":
            return self._shifted(u, grid, past, options)
        y, ssm = self.ssm(u, **options)
        keys, values = (
            grid.to_blocks(part, None if held is None else held.transpose(1, 2))
            for part, held in zip(self._project(y), past)
        )
        after = {}
        if return_state:
            unfinished = (grid.unfinished(part).transpose(1, 2) for part in (keys, values))
            after = self._state(ssm, *unfinished)
        return keys, values, after

    def _shifted(
        self,
        u: torch.Tensor,
        grid: BlockGrid,
        past: tuple[torch.Tensor | None, torch.Tensor | None],
        options: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """C_0 learned, C_i = y at the last token of block i - 1: read out there only, all filters at once."""
        selection: dict[str, Any] = {"stride": self.window} if grid.aligned else {"positions": grid.ends}
        y, ssm = self.ssm(u, **options, **selection)  # (B, J or L // W, S, d)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        first = grid.is_first_block[..., None, None, None]
        for parts, new, initial, held in zip((keys, values), self._project(y), self._initial(), past):
            initial = initial.expand(u.shape[0], 1, *initial.shape)
            later = torch.where(first[:, 1 : 1 + new.shape[1]], initial, new)
            # before the first block is over, a cache may hold anything
            start = initial if held is None else torch.where(first[:, :1], initial, held.transpose(1, 2).unsqueeze(1))
            parts.append(torch.cat([start, later], dim=1))
        after = {}
        if options["return_final_state"]:
            rows = torch.arange(u.shape[0], device=u.device)
            after = self._state(ssm, *(part[0][rows, grid.next_block].transpose(1, 2) for part in (keys, values)))
        return keys[0][:, : grid.num_blocks], values[0][:, : grid.num_blocks], after

    @with_accelerate_hooks
    def step(
        self, queries: torch.Tensor, x: torch.Tensor, state: dict[str, torch.Tensor], *, right: int, **scales: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One token of each row after earlier ones, without gradients; the tensors of `state` are overwritten.

        Args:
            queries: (B, H, e), not yet scaled.
            x: (B, d), the layer's input.
            state: as in `forward`, with the tokens before this one, `seen` (B,).
            right: 0 if the token sees its own slot, else -1.
            scales: `scale` and `head_scale` of `attention_step`.

        Returns:
            What the token finds (B, H, e), and the state after it.
        """
        u = x if self.input_norm is None else self.input_norm(x)
        held, seen = (state["context_key"], state["context_value"]), state["seen"]
        if self.variant == "mf":
            return self._shifted_step(queries, u, state, **scales)
        y, ssm = self.ssm.step_(u, mixer_state(state))
        z = self.norm(y)  # a step normalises the keys itself
        k, v = (layer(z).view(queries.shape) for layer in (self.k_proj, self.v_proj))
        found = attention_step(queries, k, v, *held, seen, window=(None, right), block=True, **scales)
        return found, self._state(ssm, *held)

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
            return found, self._state(self.ssm.advance_(u, mixer_state(state)), *held)
        y, ssm = self.ssm.step_(u, mixer_state(state))
        over = (seen % self.window == self.window - 1).view(-1, 1, 1, 1)
        after = (torch.where(over, new.transpose(1, 2).to(old.dtype), old) for new, old in zip(self._project(y), held))
        return found, self._state(ssm, *after)

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
        return (l2_normalise(keys) if self.key_norm else keys), values

    def _state(self, ssm: State | None, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**named_states(ssm), "context_key": keys, "context_value": values}


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
