# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""PyTorch SPADE encoder-decoder (arXiv 2212.08136): T5-like, for summarization and other text-to-text tasks."""

from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple

from hf_hybrid_ssm.models.cache import refuse_while_recomputing
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPE
from hf_hybrid_ssm.models.generation import HybridGenerationMixin
from hf_hybrid_ssm.models.heads import LMHead
from hf_hybrid_ssm.models.inputs import check_arguments, check_inputs, check_labels
from hf_hybrid_ssm.models.outputs import (
    CACHE,
    Seq2SeqLMOutputWithCache,
    Seq2SeqModelOutputWithCache,
    by_both_cache_names,
)
from hf_hybrid_ssm.models.spade.configuration_spade_seq2seq import SpadeSeq2SeqConfig
from hf_hybrid_ssm.models.spade.modeling_spade import (
    ENCODER_HEADS,
    BaseOfCheckpoint,
    SpadeEncoder,
    SpadeEncoderModel,
    SpadeForQuestionAnswering,
    SpadeForSequenceClassification,
    SpadeForTokenClassification,
    SpadePreTrainedModel,
    spade_embedding,
)
from hf_hybrid_ssm.models.spade.modeling_spade_decoder import SpadeDecoder, prepare_seq2seq_cache
from hf_hybrid_ssm.ops.core.checks import check_tensor


@auto_docstring
class SpadeSeq2SeqModel(BaseOfCheckpoint, SpadePreTrainedModel):
    config: SpadeSeq2SeqConfig
    encoder_architectures = tuple(f"SpadeSeq2Seq{head}" for head in ENCODER_HEADS)

    def __init__(self, config: SpadeSeq2SeqConfig):
        super().__init__(config)
        self.embed_tokens = spade_embedding(config)
        self.encoder = SpadeEncoder(config)
        self.decoder = SpadeDecoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_encoder(self, modality: str | None = None) -> "SpadeSeq2SeqEncoder":
        return SpadeSeq2SeqEncoder(self)

    @can_return_tuple
    @auto_docstring
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        check_arguments(self, kwargs)
        refuse_documents(kwargs)
        kwargs.pop("is_causal", None)  # the encoder is not
        self._refuse_attentions(kwargs.get("output_attentions"))
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if refuse_while_recomputing(self, cache):
            use_cache, cache = False, None
        if kwargs.get("output_hidden_states") is None:
            kwargs["output_hidden_states"] = self.config.output_hidden_states
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask, inputs_embeds, **kwargs)
        encoder_states = encoder_outputs[0]
        check_tensor("encoder_outputs[0]", encoder_states, (None, None, self.config.hidden_size), "B, S, hidden_size")
        if isinstance(attention_mask, torch.Tensor) and attention_mask.shape != encoder_states.shape[:2]:
            raise ValueError(
                f"attention_mask must have the encoder's shape {tuple(encoder_states.shape[:2])}, got "
                f"{tuple(attention_mask.shape)}."
            )
        sizes = (self.config.vocab_size, self.config.hidden_size)
        check_inputs(decoder_input_ids, decoder_inputs_embeds, *sizes, prefix="decoder_")
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.embed_tokens(decoder_input_ids)
        if decoder_inputs_embeds.shape[0] != encoder_states.shape[0]:
            raise ValueError(
                f"decoder_input_ids has a batch of {decoder_inputs_embeds.shape[0]}, but the encoder's input has one "
                f"of {encoder_states.shape[0]}."
            )
        if use_cache or cache is not None:
            cache = prepare_seq2seq_cache(cache, self.config, *decoder_inputs_embeds.shape[:2])
        if isinstance(decoder_attention_mask, dict):
            decoder_attention_mask = decoder_attention_mask[STATE_LAYER_TYPE]
        inputs = (decoder_inputs_embeds, encoder_states, decoder_attention_mask, attention_mask)
        outputs = self.decoder(*inputs, cache, return_dict=True, **kwargs)
        return Seq2SeqModelOutputWithCache(
            last_hidden_state=outputs.last_hidden_state,
            **{CACHE: cache if use_cache else None},
            decoder_hidden_states=outputs.hidden_states,
            encoder_last_hidden_state=encoder_states,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
        )


def refuse_documents(others: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: documents of packed rows are told apart, which the decoder and its attention to the source do not.
    """
    for name in ("position_ids", "seq_idx", "cu_seq_lens_q"):
        if others.get(name) is not None:
            raise ValueError(f"{name}: an encoder-decoder reads one source and one target a row.")


class SpadeSeq2SeqEncoder(nn.Module):
    """The encoder with the embeddings that it shares with the decoder, made of the model's own modules; `generate`
    calls it before the first token."""

    main_input_name = "input_ids"

    def __init__(self, model: SpadeSeq2SeqModel):
        super().__init__()
        self.config = model.config
        self.embed_tokens, self.encoder = model.embed_tokens, model.encoder
        self.training = model.training

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """`labels` are the decoder's: `Seq2SeqTrainer` gives them to `generate`, which hands them on."""
        refuse_documents(kwargs)
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        kwargs["return_dict"] = True
        return self.encoder(inputs_embeds=embeddings, attention_mask=attention_mask, **kwargs)


@auto_docstring
class SpadeForConditionalGeneration(HybridGenerationMixin, LMHead, SpadePreTrainedModel, GenerationMixin):
    config: SpadeSeq2SeqConfig
    model: SpadeSeq2SeqModel
    base_model_class = SpadeSeq2SeqModel
    continues_texts = False

    def __init__(self, config: SpadeSeq2SeqConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # whose labels are not shifted: the decoder's input is

    def get_encoder(self, modality: str | None = None) -> SpadeSeq2SeqEncoder:
        return self.model.get_encoder()

    def _prefill(self, input_ids: torch.Tensor, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whose pieces of a prompt would cut the source's mask.

        Raises:
            ValueError: `prefill_chunk_size` is set.
        """
        if (size := generation_config.prefill_chunk_size) is not None:
            raise ValueError(
                f"prefill_chunk_size={size} is for models of one stack: an encoder-decoder reads its source at once."
            )
        return super()._prefill(input_ids, generation_config, *args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels (B, T) shifted one to the right, after the start token; -100 becomes padding."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise ValueError(
                f"decoder_start_token_id={start} and pad_token_id={padding} of the configuration must both be set to "
                "make decoder_input_ids from labels; or give decoder_input_ids."
            )
        shifted = torch.cat([labels.new_full((labels.shape[0], 1), start), labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, padding)

    @can_return_tuple
    @auto_docstring
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: tuple | BaseModelOutput | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, target_length)`, *optional*):
            The target; the decoder reads it one token later. -100 is ignored.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            check_labels(labels, self.config.vocab_size, None)
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits, loss = self._predict(outputs.last_hidden_state, labels, **kwargs)
        others = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutputWithCache(loss=loss, logits=logits, **others)


class SpadeSeq2SeqEncoderModel(SpadeEncoderModel):
    """The encoder of an encoder-decoder, alone."""

    config: SpadeSeq2SeqConfig


class SpadeSeq2SeqForSequenceClassification(SpadeForSequenceClassification):
    """A classifier over the encoder of an encoder-decoder."""

    config: SpadeSeq2SeqConfig


class SpadeSeq2SeqForTokenClassification(SpadeForTokenClassification):
    """One class per token, over the encoder of an encoder-decoder."""

    config: SpadeSeq2SeqConfig


class SpadeSeq2SeqForQuestionAnswering(SpadeForQuestionAnswering):
    """Start and end of a span, over the encoder of an encoder-decoder."""

    config: SpadeSeq2SeqConfig


__all__ = [
    "SpadeForConditionalGeneration",
    "SpadeSeq2SeqEncoderModel",
    "SpadeSeq2SeqForQuestionAnswering",
    "SpadeSeq2SeqForSequenceClassification",
    "SpadeSeq2SeqForTokenClassification",
    "SpadeSeq2SeqModel",
]
