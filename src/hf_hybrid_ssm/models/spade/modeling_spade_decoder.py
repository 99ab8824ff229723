# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""The decoder of SPADE's encoder-decoder: cross-attention, layers, positions, and the cache of one source."""

import weakref
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.output_capturing import capture_outputs

from hf_hybrid_ssm.models.cache import (
    begin_forward,
    finish_forward,
    is_recurrent_state_layer,
    prepare_cache,
    read_rows,
    state_layer,
)
from hf_hybrid_ssm.models.columns import ColumnRows, with_columns
from hf_hybrid_ssm.models.inputs import refuse_where
from hf_hybrid_ssm.models.outputs import CACHE, BaseModelOutputWithCache
from hf_hybrid_ssm.models.packing import PackedRows, packed_rows
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.configuration_spade_seq2seq import SpadeSeq2SeqConfig
from hf_hybrid_ssm.models.spade.modeling_spade import SpadeBlock, SpadePreTrainedModel, SpadeStack, build_norm
from hf_hybrid_ssm.models.state_layers import RecurrentStateLayer
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.full_attention import attention


class SpadeCrossAttention(nn.Module):
    """Scaled attention to all real tokens of the encoder, without bias by distance."""

    def __init__(self, config: SpadeConfig, layer_idx: int, bias: bool):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.dropout = config.num_attention_heads, nn.Dropout(config.attention_dropout)
        sizes = (config.hidden_size, config.hidden_size, bias)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(*sizes) for _ in range(4))

    def forward(
        self,
        x: torch.Tensor,
        encoder_states: torch.Tensor,
        mask: torch.Tensor | None,
        cache: EncoderDecoderCache | None,
    ) -> torch.Tensor:
        """(B, T, d), (B, S, d), mask (B, 1, 1, S) → (B, T, d); keys and values are computed once per cache."""
        q = self._heads(self.q_proj(x))
        if cache is not None and cache.is_updated.get(self.layer_idx):
            of_source = state_layer(cache.cross_attention_cache, self.layer_idx).states
            k, v = of_source["keys"], of_source["values"]
        else:
            k, v = self._heads(self.k_proj(encoder_states)), self._heads(self.v_proj(encoder_states))
            if cache is not None:
                layer = state_layer(cache.cross_attention_cache, self.layer_idx)
                source = {"source": encoder_states.detach()} if self.layer_idx == 0 else {}
                layer.update_states(packed_rows(length=k.shape[2]), {"keys": k, "values": v, **source})
                cache.is_updated[self.layer_idx] = True
        dropout = self.dropout.p if self.dropout.training else 0.0
        y = attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class SpadeDecoderBlock(SpadeBlock):
    """Self-attention (with a state-space model where global), cross-attention, feed-forward, each with its own
    norm."""

    def __init__(self, config: SpadeConfig, layer_idx: int, bias: bool):
        super().__init__(config, layer_idx, is_causal=True, attention_bias=bias)
        self.cross_attn = SpadeCrossAttention(config, layer_idx, bias)
        self.cross_attn_norm = build_norm(config)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_states: torch.Tensor,
        encoder_mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        rows: PackedRows | None = None,
        cache: EncoderDecoderCache | None = None,
    ) -> torch.Tensor:
        own = None if cache is None else cache.self_attention_cache
        mixing = {"bias": bias, "rows": rows, "cache": own}
        hidden_states = self._residual(hidden_states, rows, self.mixing, self.mixing_norm, **mixing)
        cross = {"encoder_states": encoder_states, "mask": encoder_mask, "cache": cache}
        hidden_states = self._residual(hidden_states, rows, self.cross_attn, self.cross_attn_norm, **cross)
        return self._residual(hidden_states, rows, self.feed_forward, self.feed_forward_norm)


class SpadeDecoder(SpadeStack, SpadePreTrainedModel):
    """The decoder's layers with their positions, between embeddings and head."""

    _can_record_outputs = {"hidden_states": SpadeDecoderBlock}

    def __init__(self, config: SpadeSeq2SeqConfig):
        stack = config.decoder_config()
        super().__init__(stack)
        self.positions = None
        if config.decoder_position_embedding_type == "learned":
            self.positions = nn.Embedding(config.max_target_positions, config.hidden_size)
        bias = config.decoder_attention_bias
        blocks = (SpadeDecoderBlock(stack, index, bias) for index in range(config.num_decoder_layers))
        self._build_stack(stack, is_causal=True, blocks=blocks)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        embeddings: torch.Tensor,
        encoder_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_mask: torch.Tensor | None,
        cache: EncoderDecoderCache | None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """(B, T, d), (B, S, d) → (B, T, d)."""
        own = None if cache is None else cache.self_attention_cache
        given: dict[str, Any] = {"attention_mask": attention_mask, "mask_name": "decoder_attention_mask"}
        read = read_rows(own, embeddings.shape[:2], **given)
        rows = with_columns(read, **given, needs_starts=False, keeps_padding=self.positions is not None)
        if self.positions is not None:
            embeddings = embeddings + self.positions(
                self._position_ids(rows, self.positions.num_embeddings, embeddings.device)
            )
        hidden_states = self._enter_stack(embeddings)
        mask, source = None, encoder_states
        if encoder_mask is not None:
            real = encoder_mask != 0
            # the weight of padding is 0, and 0 times NaN is NaN
            mask, encoder_states = real[:, None, None], torch.where(real.unsqueeze(-1), encoder_states, 0.0)
        if cache is not None:
            check_source(cache, source, encoder_states)
        inputs = (encoder_states, mask, self._shared_bias(), rows)
        begin_forward(own)
        hidden_states = self._through_layers(hidden_states, *inputs, cache=cache)
        finish_forward(own, self)
        return BaseModelOutputWithCache(
            last_hidden_state=self._last_norm(hidden_states, rows),
            **{CACHE: cache},
        )

    def _position_ids(self, rows: ColumnRows, limit: int, device: torch.device) -> torch.Tensor:
        positions = rows.positions(device)
        if can_read_values(positions) and positions.max() >= limit:
            raise ValueError(
                f"the target has {int(positions.max()) + 1} tokens, but max_target_positions={limit}; "
                'decoder_position_embedding_type="relative" has no limit.'
            )
        return positions


# of each cache, by the layer that holds its source: the encoder's output that it was given last
_GIVEN: weakref.WeakKeyDictionary[RecurrentStateLayer, weakref.ref[torch.Tensor]] = weakref.WeakKeyDictionary()


def check_source(cache: EncoderDecoderCache, source: torch.Tensor, encoder_states: torch.Tensor) -> None:
    """Refuse a source other than the one whose keys and values the cache holds.

    `generate` gives the same tensor at every step, whose values need not be compared.

    Args:
        source: (B, S, d), as the encoder returned it.
        encoder_states: the same with zeros for padding.

    Raises:
        ValueError: they are those of another source.
    """
    layer = state_layer(cache.cross_attention_cache, 0)
    if torch.compiler.is_compiling():
        return
    given = _GIVEN.get(layer)
    if given is not None and given() is source and cache.is_updated.get(0):
        return
    if cache.is_updated.get(0):
        first = layer.states["source"]
        message = (
            "cache was filled with another source: input_ids, encoder_outputs or the attention_mask are not "
            "those that this target began with. Give the same, or use a new cache."
        )
        if first.shape != encoder_states.shape:
            raise ValueError(message)
        is_same = torch.isclose(first, encoder_states.to(first.device), rtol=1e-3, atol=1e-3, equal_nan=True).all()
        refuse_where(~is_same, message)
    _GIVEN[layer] = weakref.ref(source)


def prepare_seq2seq_cache(
    cache: Cache | None, config: SpadeSeq2SeqConfig, batch_size: int, length: int
) -> EncoderDecoderCache:
    """The cache to use in a forward of `length` tokens of the target: a new one, or the given one if it fits the model
    and the batch."""
    if cache is None:
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    if not isinstance(cache, EncoderDecoderCache):
        raise TypeError(f"cache must be an EncoderDecoderCache, got {type(cache).__name__}.")
    prepare_cache(cache.self_attention_cache, config, batch_size, length)
    cross = cache.cross_attention_cache
    if any(not is_recurrent_state_layer(layer) for layer in cross.layers) or not cross.layers:
        cross.layers = DynamicCache(config=config).layers
    return cache
