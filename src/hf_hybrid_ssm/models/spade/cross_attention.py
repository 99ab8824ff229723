"""Cross-attention of the decoder, and its cache: keys and values of one source."""

import weakref

import torch
from torch import nn
from transformers import Cache, DynamicCache, EncoderDecoderCache

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer, prepare_cache, state_layer
from hf_hybrid_ssm.models.packing import packed_rows
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig, SpadeSeq2SeqConfig
from hf_hybrid_ssm.models.state_layers import RecurrentStateLayer
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.full_attention import attention


class SpadeCrossAttention(nn.Module):
    """Scaled attention to all real tokens of the encoder, without bias by distance."""

    def __init__(self, config: SpadeConfig, layer_idx: int, bias: bool):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.dropout = config.num_attention_heads, config.attention_dropout
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
        dropout = self.dropout if self.training else 0.0
        y = attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


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
        if not can_read_values(is_same):
            torch._assert_async(is_same, message)
        elif not bool(is_same):
            raise ValueError(message)
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
