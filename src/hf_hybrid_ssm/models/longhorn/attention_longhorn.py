"""The attention layers of hybrid Longhorn stacks, over all tokens or a window; the paper's models have neither."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import is_flash_attention_requested

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.models.base import HybridModelMixin
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.cache import read_rows, served_keys
from hf_hybrid_ssm.models.columns import ColumnRows, check_cache_without_states, held_attention, with_columns
from hf_hybrid_ssm.models.generation import HybridGenerationMixin
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.outputs import CACHE, take_cache
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Window, append_to_window, local_attention

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (B or 1, L, head_dim) of rotary positions."""


class RotaryEmbedding(Float32ParametersMixin, LlamaRotaryEmbedding):
    """Llama's rotary positions, whose frequencies a cast of the model does not round.

    No checkpoint holds them: rounded ones would come back exact, and a reloaded model would compute something else.
    """

    float32_parameters = ("inv_freq", "original_inv_freq")

    def __init__(self, config: LonghornConfig):
        sized: Any = copy.copy(config)
        vars(sized).setdefault("max_position_embeddings", None)  # which Llama's reads, and here may be absent
        super().__init__(sized)
        self.config = config


class LonghornAttention(nn.Module):
    """Grouped-query attention with rotary positions to all tokens of a document."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.dropout, self.is_causal = self.head_dim**-0.5, nn.Dropout(config.attention_dropout), True
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: Angles,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, L, M) → (B, L, M) and the weights, where the implementation of attention returns them."""
        if rows.token_mask is not None:  # the weight of padding is 0, and 0 times NaN is NaN
            hidden_states = torch.where(rows.token_mask.unsqueeze(-1), hidden_states, 0.0)
        queries, keys, values = (x.transpose(1, 2) for x in self.heads(hidden_states, position_embeddings))
        if cache is not None:
            if (served := served_keys(cache, self.layer_idx)) is not None:
                return self.o_proj(served.attend(queries, keys, values, scale=self.scaling)), None
            keys, values = cache.update(keys, values, self.layer_idx)
        heads = queries, keys, values
        name, dropout = self.config._attn_implementation, self.dropout.p if self.dropout.training else 0.0
        held = held_attention(name, rows, *heads, attention_mask, scaling=self.scaling, dropout=dropout)
        if held is not None:
            return self.o_proj(held.flatten(2)), None
        output, weights = self._attend(*heads, attention_mask, **kwargs)
        return self.o_proj(output), weights

    def heads(self, x: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, L, heads, head_dim); in the dtype of the values, since under autocast the
        angles are float32."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *angles, unsqueeze_dim=2)
        return q.to(v.dtype), k.to(v.dtype), v

    def _attend(self, *heads: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values (B, heads, L, head_dim) and the mask → (B, L, heads · head_dim) and the weights, by
        the attention that the configuration names."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout.p if self.dropout.training else 0.0
        output, weights = attend(self, *heads, dropout=dropout, scaling=self.scaling, **options)
        return output.flatten(2), weights


class LonghornWindowAttention(RecurrentMixin, LonghornAttention):
    """Attention to the last `sliding_window` tokens, including the current one; padding does not count."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        assert config.sliding_window is not None  # `LonghornConfig` refuses such layers without it
        self.window = Window.of((config.sliding_window - 1, 0))

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: Angles,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As of `LonghornAttention`, without weights."""
        return self.forward_with_cache(*self.heads(hidden_states, position_embeddings), rows=rows, cache=cache), None

    def forward_rows(self, *heads: torch.Tensor, past: States, rows: Rows) -> tuple[torch.Tensor, States]:
        queries, keys, values = (x.transpose(1, 2) for x in heads)
        if not past and rows.documents is None and is_flash_attention_requested(self.config):
            # a row's only document from its start; padding comes after all tokens that look back
            output, _ = self._attend(queries, keys, values, None, sliding_window=self.config.sliding_window)
            states = self.states_after(*heads, past=past, rows=rows) if rows.return_final_state else {}
            return self.o_proj(output), states
        output, state = local_attention(
            queries,
            keys,
            values,
            window=self.window,
            scale=self.scaling,
            dropout=self.dropout.p if self.dropout.training else 0.0,
            rows=rows,
            initial_state=AttentionState(**past) if past else None,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), {} if state is None else state._asdict()

    def states_after(self, *heads: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        """The last keys and values, without attending."""
        before = AttentionState(**past) if past else None
        keys, values = (x.transpose(1, 2) for x in heads[1:])
        return append_to_window(before, keys, values, self.window.left, rows)._asdict()


ATTENTION = {"window_attention": LonghornWindowAttention, "full_attention": LonghornAttention}


class AttendingModel(HybridModelMixin):
    """What a base model computes once for all of its attention layers."""

    rotary_emb: RotaryEmbedding | None

    def add_positions(self, config: LonghornConfig) -> None:
        self.uses_positions = config.has_attention
        self.rotary_emb = RotaryEmbedding(config) if config.has_attention else None

    def _run_layers(
        self, hidden_states: torch.Tensor, rows: PackedRows, cache: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        mask, position_ids, masks = (kwargs.pop(name) for name in ("attention_mask", "position_ids", "masks"))
        if self.rotary_emb is not None:
            # prepared masks contain the padding, and a token mask that grows would recompile every compiled step
            rows = with_columns(rows, mask, needs_starts=True, keeps_padding=masks is None or position_ids is None)
            check_cache_without_states(cache, rows)
            positions = rows.positions(hidden_states.device) if position_ids is None else position_ids
            masks = attention_masks(self.config, hidden_states, rows, cache) if masks is None else masks
            kwargs |= {"position_embeddings": self.rotary_emb(hidden_states, positions)}
            kwargs |= {"attention_mask": masks.get("full_attention")}
        return self._through_layers(hidden_states, rows, cache=cache, **kwargs)


def _has_begun(starts, past, row, head, query, key):
    """Whether the key's column is one of the query's document."""
    return key >= starts[row, query - past]


def attention_masks(
    config: LonghornConfig, inputs_embeds: torch.Tensor, rows: ColumnRows, cache: Cache | None
) -> dict[str, torch.Tensor | None]:
    """The masks of the attention layers, by layer type.

    Documents are found by `rows` only: given positions, transformers would look for them again.

    Raises:
        ValueError: transformers makes no masks for the implementation of attention.
    """
    if "full_attention" not in config.layer_types:
        return {}
    if config._attn_implementation not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} has no mask function, without which its layers "
            "attend to padding and to other documents: give one of that name to AttentionMaskInterface.register."
        )
    starts, real = rows.starts, rows.full_token_mask
    # not elsewhere: with a function of positions transformers goes through vmap, which torch.export cannot save
    is_flex = starts is not None and config._attn_implementation == "flex_attention"
    mask = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=real,
        **{CACHE: cache},
        # it looks at the padding's values
        allow_is_causal_skip=starts is None and not inputs_embeds.is_meta and (real is None or can_read_values(real)),
        and_mask_function=partial(_has_begun, starts, rows.past) if is_flex else None,
    )
    if starts is not None and isinstance(mask, torch.Tensor) and mask.dim() == 4:
        own = (torch.arange(mask.shape[-1], device=mask.device) >= starts.unsqueeze(-1)).unsqueeze(1)
        # ONNX Runtime fills no boolean tensors
        mask = mask & own if mask.dtype == torch.bool else mask.masked_fill(~own, torch.finfo(mask.dtype).min)
    return {"full_attention": mask}


class AttendingGeneration(HybridGenerationMixin):
    """Of the language model."""

    def create_masks_for_generate(
        self, config: Any, inputs_embeds: Any, attention_mask: Any, position_ids: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As of `HybridGenerationMixin`, with the masks of full attention."""
        padding = super().create_masks_for_generate(config, inputs_embeds, attention_mask, **kwargs)
        cache = take_cache(kwargs)
        read = read_rows(
            cache,
            inputs_embeds.shape[:2],
            attention_mask=attention_mask,
            position_ids=position_ids,
            continues_documents=not kwargs.get("is_first_iteration"),
        )
        rows = with_columns(read, attention_mask, needs_starts=True, keeps_padding=True)
        rows = replace(rows, full_token_mask=None if attention_mask is None else attention_mask != 0)
        return attention_masks(config, inputs_embeds, rows, cache) | padding
