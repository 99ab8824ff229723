# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""SPADE encoder-decoder configuration."""

import dataclasses
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_hybrid_ssm.models.spade.configuration_spade import (
    ATTENTION_TYPES,
    CACHE_LAYER_TYPES,
    SpadeConfig,
    SpadeStackConfig,
    stack_tp_plan,
)


@strict
class SpadeSeq2SeqConfig(SpadeStackConfig, PreTrainedConfig):
    r"""
    Configuration of a T5-like SPADE encoder-decoder. The defaults are SPADE base as its released code builds and
    trains it: post layer norm, a frozen bidirectional S4 in the encoder's bottom layer, through which no gradient goes
    (`ssm_stop_gradient=True`), window attention in the encoder, full causal attention with learned positions in the
    decoder, and dropout inside the feed-forward layers too (`activation_dropout=0.1`).
    `decoder_attention_type="window"`, `decoder_ssm_layers=[0]` and `decoder_position_embedding_type="relative"`
    give the paper's literal reading.

    Args:
        num_decoder_layers (`int`, *optional*, defaults to 12): Number of decoder layers.
        decoder_attention_type (`str`, *optional*, defaults to `"full"`): As `attention_type`, for the decoder. With
            `"window"` its token sees `sliding_window - 1` tokens, including itself, and at least 2: one fewer than
            that of a language model, the encoder's reach to one side.
        decoder_ssm_layers (`list[int]`, *optional*, defaults to `[]`): As `ssm_layers`.
        decoder_position_embedding_type (`str`, *optional*, defaults to `"learned"`): `"learned"` absolute positions,
            or the `"relative"` bias.
        decoder_attention_bias (`bool`, *optional*, defaults to `False`): Biases in the decoder's attention maps.
        max_target_positions (`int`, *optional*, defaults to 1024): Learned positions.
        decoder_start_token_id (`int`, *optional*, defaults to 0): The token every target starts with.

    All other arguments are those of [`SpadeConfig`], which the encoder uses in the same way, without those of adaptive
    vocabularies, of causal classifiers, of pairs of texts and of pixels.
    """

    model_type = "spade_seq2seq"
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        **stack_tp_plan("encoder.layers", "decoder.layers"),
        **{f"decoder.layers.*.cross_attn.{name}_proj": "colwise_gather_output" for name in "qkv"},
        "decoder.layers.*.cross_attn.o_proj": "rowwise_split_input",
    }
    base_model_pp_plan = None
    presets: ClassVar[dict[str, dict[str, Any]]] = {"spade-base": {}, "spade-base++": {}}

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    sliding_window: int = 129
    relative_bias_scope: str = "per_layer"
    norm_position: str = "post"
    layer_norm_epsilon: float = 1e-6
    ssm_stop_gradient: bool = True
    activation_dropout: float | int = 0.1
    num_decoder_layers: int = 12
    decoder_attention_type: str = "full"
    decoder_ssm_layers: list[int] | tuple[int, ...] = ()
    decoder_position_embedding_type: str = "learned"
    decoder_attention_bias: bool = False
    max_target_positions: int = 1024
    decoder_start_token_id: int | None = 0
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs):
        self.decoder_ssm_layers = list(self.decoder_ssm_layers)
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer each decoder layer needs."""
        return [CACHE_LAYER_TYPES[self.decoder_attention_type]] * self.num_decoder_layers

    def validate_architecture(self):
        """Sizes that fit together, names that exist."""
        if not self.is_encoder_decoder:
            raise ValueError(
                "is_encoder_decoder=False contradicts SpadeSeq2SeqConfig; SpadeConfig is without a decoder."
            )
        if self.decoder_start_token_id is not None and not 0 <= self.decoder_start_token_id < self.vocab_size:
            raise ValueError(
                f"decoder_start_token_id={self.decoder_start_token_id} must lie below vocab_size={self.vocab_size}."
            )
        super().validate_architecture()
        self.check_positive("num_decoder_layers", "max_target_positions")
        self.check_choice("decoder_attention_type", ATTENTION_TYPES)
        self.check_choice("decoder_position_embedding_type", ("learned", "relative"))
        self._check_layers("decoder_ssm_layers", self.num_decoder_layers)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """As in transformers, which takes a cache's number of layers from the `num_hidden_layers` of what it gets."""
        return self.decoder_config() if decoder and not encoder else super().get_text_config(decoder, encoder)

    def decoder_config(self) -> SpadeConfig:
        """The decoder's stack as a configuration of its own."""
        own = {field.name for field in dataclasses.fields(self)}
        names = (field.name for field in dataclasses.fields(SpadeConfig) if field.name in own)
        fields = {name: getattr(self, name) for name in names}
        relative = self.decoder_position_embedding_type == "relative"
        stack = SpadeConfig(
            **fields
            | {
                "num_hidden_layers": self.num_decoder_layers,
                "attention_type": self.decoder_attention_type,
                "ssm_layers": self.decoder_ssm_layers,
                "relative_bias_scope": self.relative_bias_scope if relative else "none",
                "sliding_window": max(self.sliding_window - 1, 2),
                "is_encoder_decoder": False,
            }
        )
        stack.base_model_pp_plan = None  # type: ignore[misc]  # the whole model has none
        stack._attn_implementation = self._attn_implementation  # transformers keeps it apart from the fields
        return stack


__all__ = ["SpadeSeq2SeqConfig"]
