"""Context states, which summarise all tokens before a block of the Block-State Transformer.

A state-space model runs over the whole sequence; its outputs, cut into blocks, become keys and values that the tokens
of the block attend to (section 3 of the paper):

    "sh"  one filter; block i has its outputs at the tokens of block i, attended to causally by all heads
    "mh"  a filter for each key/value head, whose queries attend to the outputs of this filter only
    "mf"  S filters; block i has their outputs at the last token of block i - 1, and block 0 learned states
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from hf_hybrid_ssm.layers.mixers.base import MixerState, mixer_state, named_states
from hf_hybrid_ssm.layers.mixers.registry import mixer_from_config
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.layers.truncated_normal import truncated_normal
from hf_hybrid_ssm.models.bst.block_states import CONTEXT, MultiFilterMixin
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise, scaled_queries
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Window, local_attention, rolled, slot_attention


class HeadwiseLinear(nn.Module):
    """One matrix for each head: (..., H, D) → (..., H, head_dim), without bias."""

    def __init__(self, num_heads: int, in_features: int, head_dim: int):
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(num_heads, in_features, head_dim))

    def set_initial_values(self) -> None:
        init.trunc_normal_(self.weight, **truncated_normal(1 / self.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...hd,hde->...he", x, self.weight)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in zip(("heads", "in", "out"), self.weight.shape))


class ContextStates(MultiFilterMixin, nn.Module):
    """The state-space model of a layer (`ssm_type`), and the keys and values that its outputs become.

    Of the configuration, `num_context_states` is S of "mf"; `ssm_input_norm` normalises the input of the state-space
    model, and `qk_norm` the keys.

    Args:
        num_heads: H of keys and values, which divides that of queries; the configuration's by default.
        bias: in the maps to keys and values of "sh" and "mf".
    """

    def __init__(self, config: BstConfig, num_heads: int | None = None, bias: bool = False):
        super().__init__()
        hidden_size, head_dim = config.hidden_size, config.head_dim
        num_heads = config.num_attention_heads if num_heads is None else num_heads
        eps, variant = config.layer_norm_epsilon, config.context_variant
        filters = {"sh": None, "mh": num_heads, "mf": config.num_context_states}[variant]
        self.num_heads, self.head_dim, self.window = num_heads, head_dim, config.sliding_window
        self.variant, self.qk_norm = variant, config.qk_norm
        self.distances = Window.of((self.window - 1, self.window - 1 if config.bidirectional else 0))
        self.input_norm = RMSNorm(hidden_size, eps=eps) if config.ssm_input_norm else None
        self.ssm = mixer_from_config(config, bidirectional=config.bidirectional, num_filters=filters)
        self.norm = RMSNorm(hidden_size, eps=eps)
        if variant == "mh":
            self.k_proj: nn.Module = HeadwiseLinear(num_heads, hidden_size, head_dim)
            self.v_proj: nn.Module = HeadwiseLinear(num_heads, hidden_size, head_dim)
        else:
            self.k_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
            self.v_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        if variant == "mf":
            self.add_contexts(config.num_context_states, hidden_size)

    def forward(
        self,
        queries: torch.Tensor,
        x: torch.Tensor,
        past: States,
        rows: Rows,
        *,
        head_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, States]:
        """Cross-attention of tokens to the context states of their blocks.

        Args:
            queries: (B, L, heads, e), not yet scaled; H divides their number.
            x: (B, L, d), the layer's input.
            past, rows: as of `RecurrentMixin.forward_rows`; `past` has `seen` (B,) besides what an earlier call
                returned.
            head_scale: as of `scaled_queries`.

        Returns:
            (B, L, heads, e), and the state after the tokens, empty if it was not asked for.
        """
        if rows.is_step and past:
            attend = self._attend_multi_filter_token if self.variant == "mf" else self._attend_token
            scales = {"scale": None if head_scale is None else 1.0, "head_scale": head_scale}
            y, after = attend(queries.transpose(1, 2), self._ssm_input(x), past, rows, **scales)
            return y.transpose(1, 2), after
        if self.variant == "mf":
            return self._attend_by_block(queries, x, past, rows, head_scale)
        return self._attend_by_token(scaled_queries(queries, head_scale), x, past, rows)

    def _attend_by_token(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, States]:
        """`forward` of "sh" and "mh", whose blocks have a context state for each of their tokens: attention within
        chunks of W tokens."""
        keys, values, ssm = self.by_token(x, past, rows)
        state = None
        if past:
            newest_last = [rolled(past[name], -past["seen"]) for name in CONTEXT]
            state = AttentionState(newest_last[0], newest_last[1], past["seen"])
        y, unfinished = local_attention(
            *(part.transpose(1, 2) for part in (queries, keys, values)),
            window=self.distances,
            chunk_size=self.window,
            scale=1.0,
            rows=replace(rows, capacity=None),  # slot by slot here, in caches of all kinds
            initial_state=state,
        )
        if unfinished is None:
            return y.transpose(1, 2), {}
        slots = (slot_by_slot(part, unfinished.seen, self.window) for part in (unfinished.keys, unfinished.values))
        return y.transpose(1, 2), self.named_states(ssm, *slots)

    def by_token(
        self, x: torch.Tensor, past: States, rows: Rows
    ) -> tuple[torch.Tensor, torch.Tensor, MixerState | None]:
        """Of "sh" and "mh", token by token: keys and values (B, L, H, e), and the state of the state-space model. No
        shape depends on where the blocks of documents begin."""
        y, ssm = self.ssm(self._ssm_input(x), rows=rows, initial_state=mixer_state(past))
        return *self._project(y), ssm

    def _ssm_input(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.input_norm is None else self.input_norm(x)

    def _attend_token(
        self, queries: torch.Tensor, u: torch.Tensor, past: States, rows: Rows, **scales: Any
    ) -> tuple[torch.Tensor, States]:
        """`forward` of a step of "sh" and "mh": u (B, 1, d) is the input of the state-space model, queries and outputs
        are (B, heads, 1, e), scales as of `slot_attention`."""
        keys, values = (past[name] if rows.overwrites_states else past[name].clone() for name in CONTEXT)
        y, ssm = self.ssm(u, rows=rows, initial_state=mixer_state(past))
        z = self.norm(y)
        shape = (u.shape[0], self.num_heads, 1, self.head_dim)
        k, v = self.normalised(self.k_proj(z).view(shape), is_step=True), self.v_proj(z).view(shape)
        y = slot_attention(queries, k, v, keys, values, past["seen"], layout="block", **scales)
        return y, self.named_states(ssm, keys, values)

    def _maps_are_plain(self) -> bool:
        return type(self.k_proj) is nn.Linear and type(self.v_proj) is nn.Linear

    def _project(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """SSM outputs (..., [H or S,] d) → keys and values (..., [S,] H, e)."""
        z = self.norm(y)
        if self.variant == "mf":
            z = z + self.context_ids
        if self.variant == "mh":
            keys, values = self.k_proj(z), self.v_proj(z)
        else:
            # once for both; wrapped maps want the batch in front (adapters), at most three dimensions (bitsandbytes)
            flat = z.flatten(0 if self._maps_are_plain() or z.dim() < 3 else 1, -2)
            heads = (*z.shape[:-1], self.num_heads, self.head_dim)
            keys, values = self.k_proj(flat).view(heads), self.v_proj(flat).view(heads)
        return self.normalised(keys), values

    def normalised(self, keys: torch.Tensor, is_step: bool = False) -> torch.Tensor:
        """Keys (..., e), L2-normalised with `qk_norm`; the kernel of a step normalises them itself."""
        return l2_normalise(keys) if self.qk_norm and not is_step else keys

    @staticmethod
    def named_states(ssm: MixerState | None, keys: torch.Tensor, values: torch.Tensor) -> States:
        """What later forwards need: the state of the state-space model, and keys and values (B, H, W or S, e) of the
        block."""
        return named_states(ssm) | dict(zip(CONTEXT, (keys, values)))


def slot_by_slot(newest: torch.Tensor, tokens_seen: torch.Tensor, window: int) -> torch.Tensor:
    """Keys or values (B, H, W - 1 or W, e) of an unfinished block after tokens_seen (B,) tokens, the newest last as in
    `AttentionState` → (B, H, W, e) slot by slot, zero in slots that are not yet filled."""
    newest = nn.functional.pad(newest, (0, 0, window - newest.shape[2], 0))
    filled = torch.arange(window, device=newest.device) < (tokens_seen % window).unsqueeze(1)
    return torch.where(filled[:, None, :, None], rolled(newest, tokens_seen), 0.0)
