"""PyTorch SPADE models of one stack (arXiv 2212.08136): language model, encoder, classifier."""

import math
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast, SequenceClassifierOutput
from transformers.utils import auto_docstring, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_hybrid_ssm.layers.adaptive_vocabulary import AdaptiveEmbedding, AdaptiveSoftmax
from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.norms import ScaleNorm, build_norm
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.models.attentions import IN_BLOCKS, refuse_attentions
from hf_hybrid_ssm.models.base_of_checkpoint import ENCODER_HEADS, BaseOfCheckpoint
from hf_hybrid_ssm.models.cache import STATE_LAYER_TYPE, prepare_cache
from hf_hybrid_ssm.models.configuration import check_config_class
from hf_hybrid_ssm.models.heads import CausalLMHead, QuestionAnsweringHead, TokenClassificationHead
from hf_hybrid_ssm.models.inputs import check_class_labels, check_inputs
from hf_hybrid_ssm.models.packing import resolve_packing
from hf_hybrid_ssm.models.parallel_plans import MatchingPlans
from hf_hybrid_ssm.models.saving import SavesCode
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.layers_spade import SpadeBlock, relative_bias
from hf_hybrid_ssm.models.unpadding import Unpadding, unpadding_of


@auto_docstring
class SpadePreTrainedModel(MatchingPlans, SavesCode):
    config: SpadeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SpadeBlock", "SpadeDecoderBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": SpadeBlock}

    def __init__(self, config: SpadeConfig, *args: Any, **kwargs: Any):
        check_config_class(self, config)
        super().__init__(config, *args, **kwargs)

    def post_init(self):
        mixers = [module for module in self.modules() if isinstance(module, Mixer)]
        self._keep_in_fp32_modules_strict = {
            name for mixer in mixers for name in mixer.float32_parameters if name in mixer._parameters
        }
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal maps and embeddings, no bias by distance at first; state-space models start as their papers say."""
        if isinstance(module, Mixer):
            for name, value in module.initial_values().items():
                init.copy_(module.get_parameter(name), value)
            module.clear_kernel_cache()
        elif isinstance(module, nn.LSTM):
            for parameter in module.parameters():
                bound = 1 / math.sqrt(module.hidden_size)
                init.uniform_(parameter, -bound, bound)
        elif isinstance(module, RelativeBias):
            init.zeros_(module.weight)
        elif isinstance(module, ScaleNorm):
            init.ones_(module.scale)
        elif isinstance(module, AdaptiveEmbedding):
            for table in module.tables:
                init.normal_(table, std=table.shape[1] ** -0.5)
            for projection in module.projections:
                init.xavier_uniform_(projection)
        elif isinstance(module, AdaptiveSoftmax):
            init.normal_(module.clusters, std=self.config.initializer_range)
        elif isinstance(module, PixelEmbedding):  # as MEGA's
            init.normal_(module.weight, std=1.0)
            init.normal_(module.bias, std=0.1)
        else:
            super()._init_weights(module)


class SpadeStack(nn.Module):
    """The layers between embeddings and heads, causal or bidirectional."""

    def __init__(self, config: SpadeConfig, is_causal: bool):
        super().__init__()
        self.scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.embedding_norm = None
        if config.embedding_norm:
            self.embedding_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.relative_bias = relative_bias(config, is_causal) if config.relative_bias_scope == "shared" else None
        self.config = config
        self.layers = nn.ModuleList(SpadeBlock(config, index, is_causal) for index in range(config.num_hidden_layers))
        self.norm = None
        if config.final_norm:
            self.norm = build_norm(config.norm_type, config.hidden_size, config.layer_norm_epsilon)

    def forward(
        self,
        embeddings: torch.Tensor,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        every: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """(B, L, d) embeddings → (B, L, d); `every` takes the states before and behind each layer."""
        hidden_states = embeddings * self.scale
        if self.embedding_norm is not None:
            hidden_states = self.embedding_norm(hidden_states)
        hidden_states = self.dropout(hidden_states)
        bias = None if self.relative_bias is None else self.relative_bias(None)
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer while generation exits early
            if every is not None:
                every.append(hidden_states)
            # by name: gradient checkpointing takes the cache out, or a recompute would store the states twice
            hidden_states = layer(hidden_states, bias, unpadding, seq_idx, past_key_values=past_key_values)
        hidden_states = hidden_states if self.norm is None else self.norm(hidden_states)
        if every is not None:
            every.append(hidden_states)
        return hidden_states


class PixelEmbedding(nn.Linear):
    """Grey values 0 … 255 as tokens, normalised and mapped linearly to the width."""

    def __init__(self, hidden_size: int, mean: float, std: float):
        super().__init__(1, hidden_size)
        self.mean, self.std = mean, std

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(((input_ids / 255 - self.mean) / self.std).unsqueeze(-1).to(self.weight.dtype))


def spade_embedding(config: SpadeConfig) -> nn.Module:
    """The embedding that the configuration asks for."""
    if config.pixel_input:
        return PixelEmbedding(config.hidden_size, config.pixel_mean, config.pixel_std)
    if config.adaptive_cutoffs is not None:
        bands = [*config.adaptive_cutoffs, config.vocab_size]
        return AdaptiveEmbedding(bands, config.hidden_size, config.adaptive_factor)
    # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
    return nn.Embedding(config.vocab_size, config.hidden_size)


@auto_docstring
class SpadeModel(BaseOfCheckpoint, SpadePreTrainedModel):
    encoder_architectures = tuple(f"Spade{head}" for head in ENCODER_HEADS)

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.embed_tokens = spade_embedding(config)
        self.decoder = SpadeStack(config, is_causal=True)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        continues_documents: bool = False,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        r"""
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        cu_seq_lens_q (`torch.IntTensor` of shape `(documents + 1,)`, *optional*):
            Where the documents of a single packed row begin and end, instead of `seq_idx`.
        continues_documents (`bool`, *optional*, defaults to `False`):
            The first tokens go on with the documents in `past_key_values`, as they do in each step of `generate`.
        """
        refuse_attentions(self.config, kwargs.get("output_attentions"), IN_BLOCKS)
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch, length = inputs_embeds.shape[:2]
        if use_cache or past_key_values is not None:
            past_key_values = prepare_cache(past_key_values, self.config, batch)
        padding = attention_mask[STATE_LAYER_TYPE] if isinstance(attention_mask, dict) else attention_mask
        unpadding = unpadding_of(padding, batch, length)
        inputs = (seq_idx, position_ids, padding, unpadding, past_key_values, batch, length)
        packed = resolve_packing(*inputs, cu_seq_lens_q=cu_seq_lens_q, continues_documents=continues_documents)
        packed.open(past_key_values)
        hidden_states = self.decoder(inputs_embeds, unpadding, packed.seq_idx, past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states, past_key_values=past_key_values if use_cache else None
        )


@auto_docstring
class SpadeForCausalLM(CausalLMHead, SpadePreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        if config.pixel_input or config.paired_input:
            raise ValueError(
                f"pixel_input={config.pixel_input} and paired_input={config.paired_input} are for classification: a "
                "language model reads one text of tokens."
            )
        self.model = SpadeModel(config)
        self.lm_head: nn.Module
        if config.adaptive_cutoffs is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self._tied_weights_keys = {}  # it reads the embeddings themselves
            self.lm_head = AdaptiveSoftmax(self.model.embed_tokens, config.adaptive_dropout)
        self.post_init()

    def _uses_fused_loss(self) -> bool:
        if isinstance(self.lm_head, AdaptiveSoftmax):
            return self.training and self.config.use_linear_cross_entropy
        return super()._uses_fused_loss()

    def _fused_loss(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        if not isinstance(self.lm_head, AdaptiveSoftmax):
            return super()._fused_loss(hidden_states, labels, shift_labels=shift_labels, **options)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.flatten().to(hidden_states.device)
        count = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        return self.lm_head.loss(hidden_states.flatten(0, 1), targets, ignore_index) / count

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, **kwargs) -> dict:
        """Masks made ahead of compiled decoding; a generated token is never padding."""
        return {STATE_LAYER_TYPE: None if inputs_embeds.shape[1] == 1 else attention_mask}


@auto_docstring
class SpadeEncoderModel(SpadePreTrainedModel):
    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.embed_tokens = spade_embedding(config)
        self.encoder = SpadeStack(config, is_causal=False)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        seq_idx: torch.IntTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        **kwargs,
    ) -> BaseModelOutput:
        r"""
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            The document each token of a packed row belongs to; states and attention do not cross documents.
        cu_seq_lens_q (`torch.IntTensor` of shape `(documents + 1,)`, *optional*):
            Where the documents of a single packed row begin and end, instead of `seq_idx`.
        """
        refuse_attentions(self.config, kwargs.get("output_attentions"), IN_BLOCKS)
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch, length = inputs_embeds.shape[:2]
        unpadding = unpadding_of(attention_mask, batch, length)
        inputs = (seq_idx, position_ids, attention_mask, unpadding, None, batch, length)
        packed = resolve_packing(*inputs, cu_seq_lens_q=cu_seq_lens_q)
        return BaseModelOutput(last_hidden_state=self.encoder(inputs_embeds, unpadding, packed.seq_idx))


@auto_docstring
class SpadeForSequenceClassification(SpadePreTrainedModel):
    """A classifier over the bidirectional encoder."""

    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = SpadeEncoderModel(config)
        width = config.hidden_size * (2 if config.paired_input else 1)
        self.dense = nn.Linear(width, config.classifier_hidden_size)
        self.activation = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.classifier_hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)`, *optional*):
            Class indices (or values, for regression with `num_labels == 1`).
        """
        if self.config.paired_input:
            input_ids, attention_mask, inputs_embeds = (
                _halves_as_rows(name, tensor)
                for name, tensor in (
                    ("input_ids", input_ids), ("attention_mask", attention_mask), ("inputs_embeds", inputs_embeds)
                )
            )  # fmt: skip
        outputs = self.model(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        pooled = self._pool(outputs.last_hidden_state, None if attention_mask is None else attention_mask != 0)
        if self.config.paired_input:
            pooled = pooled.unflatten(0, (-1, 2)).flip(1).flatten(1)  # the second text first, as MEGA has it
        logits = self.classifier(self.dropout(self.activation(self.dense(self.dropout(pooled)))))
        loss = None
        if labels is not None:
            check_class_labels(labels, logits, self.config.problem_type)
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def _pool(self, hidden_states: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """(B, L, d) → (B, d): the first real token, or the mean of all."""
        if self.config.pooling == "mean":
            if real is None:
                return hidden_states.mean(1)
            weights = real.to(hidden_states.dtype).unsqueeze(-1)
            total = torch.where(real.unsqueeze(-1), hidden_states, 0.0).sum(1)
            return total / weights.sum(1).clamp(min=1)
        if real is None:
            return hidden_states[:, 0]
        first = real.to(torch.uint8).argmax(1)
        return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), first]


@auto_docstring
class SpadeForTokenClassification(TokenClassificationHead, SpadePreTrainedModel):
    """Over the bidirectional encoder."""

    base_model_class = SpadeEncoderModel
    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]


@auto_docstring
class SpadeForQuestionAnswering(QuestionAnsweringHead, SpadePreTrainedModel):
    """Over the bidirectional encoder."""

    base_model_class = SpadeEncoderModel
    _keys_to_ignore_on_load_unexpected = [r"decoder\.", r"lm_head\."]


def _halves_as_rows(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """(B, 2, L, ...) → (2 B, L, ...)."""
    if tensor is not None and (tensor.dim() < 3 or tensor.shape[1] != 2):
        raise ValueError(
            f"{name} must have shape (batch, 2, length) with paired_input=True, got {tuple(tensor.shape)}."
        )
    return None if tensor is None else tensor.flatten(0, 1)


__all__ = [
    "SpadeEncoderModel",
    "SpadeForCausalLM",
    "SpadeForQuestionAnswering",
    "SpadeForSequenceClassification",
    "SpadeForTokenClassification",
    "SpadeModel",
    "SpadePreTrainedModel",
]
