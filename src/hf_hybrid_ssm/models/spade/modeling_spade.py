# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""PyTorch SPADE models of one stack (arXiv 2212.08136): language model, encoder, classifier."""

import copy
import math
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import auto_docstring

from hf_hybrid_ssm.layers.feed_forward import FeedForward
from hf_hybrid_ssm.layers.local_self_attention import LocalSelfAttention
from hf_hybrid_ssm.layers.mixers.base import mixer_state, named_states
from hf_hybrid_ssm.layers.mixers.registry import mixer_from_config
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.models import classifiers
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.heads import CausalLMHead, LMHead, MaskedLMHead
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.models.spade.configuration_spade import SpadeConfig
from hf_hybrid_ssm.models.spade.options_spade import (
    AdaptiveEmbedding,
    AdaptiveSoftmax,
    PixelEmbedding,
    ResizableBandsMixin,
    ScaleNorm,
    TimeBatchNorm,
)
from hf_hybrid_ssm.ops.core.rows import Rows


def build_norm(config: SpadeConfig) -> nn.Module:
    """The normalisation of (B, L, hidden_size) that `config.norm_type` names."""
    size, eps = config.hidden_size, config.layer_norm_epsilon
    if config.norm_type == "layernorm":
        return nn.LayerNorm(size, eps=eps)
    return ScaleNorm(eps) if config.norm_type == "scalenorm" else TimeBatchNorm(size, eps=eps)


def normalised(norm: nn.Module | None, x: torch.Tensor, rows: PackedRows | None) -> torch.Tensor:
    """norm(x) of (B, L, d), or x without a norm; batch statistics leave the padding in `rows` out."""
    if isinstance(norm, TimeBatchNorm):
        return norm(x, None if rows is None else rows.token_mask)
    return x if norm is None else norm(x)


def relative_bias(config: SpadeConfig, is_causal: bool) -> RelativeBias:
    """T5's table for this stack."""
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    return RelativeBias(config.num_attention_heads, buckets, distance, bidirectional=not is_causal)


def self_attention(config: SpadeConfig, is_causal: bool, bias: bool) -> LocalSelfAttention:
    """Scaled attention within a window, a chunk or everything, with T5's bias by distance."""
    in_chunks = config.attention_type == "chunk"
    reach = (
        None if config.attention_type == "full" else (config.chunk_size if in_chunks else config.sliding_window) - 1
    )
    return LocalSelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        window=(reach, 0 if is_causal else reach),
        chunk_size=config.chunk_size if in_chunks else None,
        bias=bias,
        dropout=config.attention_dropout,
        relative_bias=relative_bias(config, is_causal) if config.relative_bias_scope == "per_layer" else None,
    )


class SpadeMixer(RecurrentMixin, nn.Module):
    """Local attention; in a layer of `ssm_layers` also a state-space model, W [LN(ssm(x)) ; LN(attention(x))] + b."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = self_attention(config, is_causal, attention_bias)
        self.merge, self.weight = config.ssm_merge, config.ssm_merge_weight
        self.stop_gradient = config.ssm_stop_gradient
        self.ssm = mixer_from_config(config, bidirectional=not is_causal) if layer_idx in config.ssm_layers else None
        if self.ssm is not None and self.merge != "stack":
            self.norm_global = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.norm_local = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        if self.ssm is not None and self.merge == "concat":
            self.aggregate = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """(B, L, d) → (B, L, d); `options` are those of `forward_with_cache`, and `bias`, shared by all layers."""
        return self.forward_with_cache(x, **options)

    def forward_rows(
        self, x: torch.Tensor, *, past: States, rows: Rows, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, States]:
        if self.ssm is None:
            return self.self_attn(x, past, rows, bias=bias)
        u = x.detach() if self.stop_gradient else x
        g, state = self.ssm(u, rows=rows, initial_state=mixer_state(past))
        a, states = self.self_attn(g if self.merge == "stack" else x, past, rows, bias=bias)
        return self._merged(g, a), states | named_states(state)

    def _merged(self, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """The outputs of state-space model and attention, (B, L, d) each, as one."""
        if self.merge == "stack":
            return a
        g, a = self.norm_global(g), self.norm_local(a)
        if self.merge == "add":
            return self.weight * g + (1 - self.weight) * a
        return self.aggregate(torch.cat([g, a], dim=-1))


class SpadeBlock(GradientCheckpointingLayer):
    """Mixing and feed-forward sublayers, with the norm before each (`pre`) or after each sum (`post`)."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.is_pre = config.norm_position == "pre"
        self.mixing = SpadeMixer(config, layer_idx, is_causal, attention_bias)
        self.mixing_norm = build_norm(config)
        activation, dropout = ACT2FN[config.hidden_act], config.activation_dropout
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, activation, dropout=dropout)
        self.feed_forward_norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        bias: torch.Tensor | None = None,
        rows: PackedRows | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        mixing = {"bias": bias, "rows": rows, "cache": cache}
        hidden_states = self._residual(hidden_states, rows, self.mixing, self.mixing_norm, **mixing)
        return self._residual(hidden_states, rows, self.feed_forward, self.feed_forward_norm)

    def _residual(
        self, x: torch.Tensor, rows: PackedRows | None, branch: nn.Module, norm: nn.Module, /, **options: Any
    ) -> torch.Tensor:
        y = branch(normalised(norm, x, rows) if self.is_pre else x, **options)
        x = x + (self.dropout(y) if self.training else y)
        return x if self.is_pre else normalised(norm, x, rows)


# weights of a language model or a decoder, which an encoder ignores
NOT_OF_THE_ENCODER = [r"decoder\.", r"lm_head\.", r"^(model\.)?(layers|norm|embedding_norm|relative_bias)\."]


@auto_docstring
class SpadePreTrainedModel(ResizableBandsMixin, HybridPreTrainedModel):
    config: SpadeConfig
    _no_split_modules = ["SpadeBlock", "SpadeDecoderBlock"]
    _can_record_outputs: dict[str, Any] = {"hidden_states": SpadeBlock}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal maps and embeddings, no bias by distance at first; state-space models start as their papers say."""
        if isinstance(module, RelativeBias):
            init.zeros_(module.weight)
        else:
            super()._init_weights(module)


# what may be asked of a checkpoint that holds the encoder, by the ends of the names of classes
ENCODER_HEADS = (
    "EncoderModel",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


class BaseOfCheckpoint(PreTrainedModel):
    """The base model that `AutoModel` builds for a configuration: the encoder instead of this class where
    `config.architectures` names an encoder, or a head over one.

    `AutoModel` always passes the configuration. Loaded by its own name without one, the class is kept.
    """

    encoder_architectures: ClassVar[tuple[str, ...]]  # the encoder first, which is in the module of the class
    needs_layers = True

    @classmethod
    def _class_for(cls, config: PreTrainedConfig | None) -> type[PreTrainedModel]:
        architectures = set(getattr(config, "architectures", None) or ())
        if getattr(config, "causal_classifier", None) or architectures.isdisjoint(cls.encoder_architectures):
            return cls
        encoder = getattr(sys.modules[cls.__module__], cls.encoder_architectures[0])
        if cls._auto_class is not None:  # a folder's own code, which is saved with the model again
            encoder.register_for_auto_class(cls._auto_class)
        return encoder

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):
        chosen = cls._class_for(kwargs.get("config"))
        load = super().from_pretrained if chosen is cls else chosen.from_pretrained
        return load(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any):
        chosen = cls._class_for(config)
        build = super()._from_config if chosen is cls else chosen._from_config
        return build(config, **kwargs)


class StackOfCheckpoint(PreTrainedModel):
    """A classifier over the stack that its checkpoint holds: loaded from a causal language model it is causal.
    `causal_classifier=False` asks for an encoder all the same, whose layers are then newly initialised.
    """

    needs_layers = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):
        config = kwargs.get("config")
        if config is None:
            options = {name: value for name, value in kwargs.items() if name != "state_dict"}
            saved = cls.config_class.get_config_dict(pretrained_model_name_or_path, **options)[0]
            if saved.get("causal_classifier") is None and _is_causal(saved.get("architectures")):
                kwargs.setdefault("causal_classifier", True)
        elif getattr(config, "causal_classifier", False) is None and _is_causal(config.architectures):
            kwargs["config"] = copy.deepcopy(config)
            kwargs["config"].causal_classifier = True
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @property
    def may_be_new(self) -> bool:
        """An encoder was asked for, of whatever checkpoint."""
        return getattr(self.config, "causal_classifier", None) is False


def _is_causal(architectures: list[str] | None) -> bool:
    return not {"SpadeForCausalLM", "SpadeModel"}.isdisjoint(architectures or ())


def spade_embedding(config: SpadeConfig) -> nn.Module:
    """The embedding that the configuration asks for."""
    if config.pixel_input:
        return PixelEmbedding(config.hidden_size, config.pixel_mean, config.pixel_std)
    if config.adaptive_cutoffs is not None:
        bands = [*config.adaptive_cutoffs, config.vocab_size]
        return AdaptiveEmbedding(bands, config.hidden_size, config.adaptive_factor)
    # no padding_idx: the end-of-text token often also pads, and its embedding must be learnt
    return nn.Embedding(config.vocab_size, config.hidden_size)


class SpadeStack(HybridModelMixin):
    """The layers between embeddings and heads, of the causal model, the encoder and the decoder; placed before
    `SpadePreTrainedModel`."""

    def _build_stack(self, config: SpadeConfig, is_causal: bool, blocks: Iterable[nn.Module] | None = None) -> None:
        if blocks is None:
            blocks = (SpadeBlock(config, index, is_causal) for index in range(config.num_hidden_layers))
        eps = config.layer_norm_epsilon
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.relative_bias = relative_bias(config, is_causal) if config.relative_bias_scope == "shared" else None
        self.layers = nn.ModuleList(blocks)
        self.norm = build_norm(config) if config.final_norm else None
        self.embedding_scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        self.gradient_checkpointing = False

    def _enter_stack(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(B, L, d) embeddings → the first layer's input."""
        return self.dropout(embeddings if self.embedding_norm is None else self.embedding_norm(embeddings))

    def _shared_bias(self) -> torch.Tensor | None:
        return None if self.relative_bias is None else self.relative_bias(None)

    def _run_layers(
        self, hidden_states: torch.Tensor, rows: PackedRows, cache: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(self.layers[0], nn.Identity):  # else the first stage of a pipeline has done it
            hidden_states = self._enter_stack(hidden_states * self.embedding_scale)
        return self._through_layers(hidden_states, self._shared_bias(), rows, cache=cache)

    def _last_norm(self, hidden_states: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        return normalised(self.norm, hidden_states, rows)


@auto_docstring
class SpadeModel(BaseOfCheckpoint, SpadeStack, SpadePreTrainedModel):
    encoder_architectures = tuple(f"Spade{head}" for head in ENCODER_HEADS)

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.embed_tokens = spade_embedding(config)
        self._build_stack(config, is_causal=True)
        self.post_init()


class SpadeLMHead(LMHead):
    """The head of SPADE's language models, causal or masked, whose vocabulary may be adaptive."""

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        if config.pixel_input or config.paired_input:
            raise ValueError(
                f"pixel_input={config.pixel_input} and paired_input={config.paired_input} are for classification: a "
                "language model reads one text of tokens."
            )

    def _build_head(self, config: SpadeConfig) -> None:
        if config.adaptive_cutoffs is None:
            super()._build_head(config)
        else:
            self._tied_weights_keys = {}  # it reads the embeddings themselves
            self.lm_head = AdaptiveSoftmax(self.model, config.adaptive_dropout)

    def _uses_fused_loss(self) -> bool:
        is_adaptive = self.training and isinstance(self.lm_head, AdaptiveSoftmax)
        return self.config.use_linear_cross_entropy if is_adaptive else super()._uses_fused_loss()


@auto_docstring
class SpadeForCausalLM(SpadeLMHead, CausalLMHead, SpadePreTrainedModel, GenerationMixin):
    base_model_class = SpadeModel


class SpadeEncoder(SpadeStack, SpadePreTrainedModel):
    """The bidirectional stack, without embeddings."""

    is_bidirectional = True

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self._build_stack(config, is_causal=False)
        self.post_init()


@auto_docstring
class SpadeEncoderModel(HybridModelMixin, SpadePreTrainedModel):
    _keys_to_ignore_on_load_unexpected = NOT_OF_THE_ENCODER
    is_bidirectional = True
    norm = None  # the encoder's own

    def __init__(self, config: SpadeConfig):
        super().__init__(config)
        self.embed_tokens = spade_embedding(config)
        self.encoder = SpadeEncoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    def _run_layers(
        self, hidden_states: torch.Tensor, rows: PackedRows, cache: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        return self.encoder._last_norm(self.encoder._run_layers(hidden_states, rows, cache, **kwargs), rows)


@auto_docstring
class SpadeForMaskedLM(SpadeLMHead, MaskedLMHead, SpadePreTrainedModel):
    """Over the bidirectional encoder."""

    base_model_class = SpadeEncoderModel


def classified_stack(config: SpadeConfig) -> SpadePreTrainedModel:
    """What a classifier reads: the encoder, or with `causal_classifier` the stack of the language model."""
    return SpadeModel(config) if config.causal_classifier else SpadeEncoderModel(config)


class SpadeClassificationHead(nn.Module):
    """A hidden layer and the scores, (B, D) → (B, C); one module, under the name by which PEFT saves a head."""

    def __init__(self, config: SpadeConfig, num_scores: int):
        super().__init__()
        width = config.hidden_size * (2 if config.paired_input else 1)
        self.dense = nn.Linear(width, config.classifier_hidden_size)
        self.activation = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.classifier_hidden_size, num_scores)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(self.dropout(pooled)))))


@auto_docstring
class SpadeForSequenceClassification(StackOfCheckpoint, classifiers.SequenceClassificationHead, SpadePreTrainedModel):
    """A classifier over the bidirectional encoder, or over the causal stack of a language model."""

    base_model_class = staticmethod(classified_stack)
    output_class = SequenceClassifierOutput
    _keys_to_ignore_on_load_unexpected = NOT_OF_THE_ENCODER

    def _build_head(self, config: SpadeConfig) -> None:
        self.num_labels = config.num_labels
        self.classifier = SpadeClassificationHead(config, self._num_scores(config))

    def _logits(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier(pooled)

    def _forward(self, inputs: dict[str, Any], targets: Any, options: dict[str, Any], kwargs: Any) -> Any:
        if self.config.paired_input:
            texts = ("input_ids", "attention_mask", "inputs_embeds")
            inputs |= {name: _halves_as_rows(name, inputs[name]) for name in texts}
        return super()._forward(inputs, targets, options, kwargs)

    def _read(self, hidden_states: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["attention_mask"]
        real = None if mask is None else mask[:, -hidden_states.shape[1] :] != 0
        if self.config.pooling == "last":
            pad = None if self.config.pixel_input else self.config.pad_token_id
            last = classifiers.last_real_token(inputs["input_ids"], mask, pad, hidden_states.shape[:2])
            pooled = hidden_states[torch.arange(len(hidden_states), device=hidden_states.device), last]
        else:
            pooled = self._pool(hidden_states, real)
        # of a pair the second text first, as MEGA has it
        return pooled.unflatten(0, (-1, 2)).flip(1).flatten(1) if self.config.paired_input else pooled

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
        rows = torch.arange(len(hidden_states), device=hidden_states.device)
        return hidden_states[rows, real.to(torch.int64).argmax(1)]


@auto_docstring
class SpadeForMultipleChoice(classifiers.MultipleChoiceHead, SpadeForSequenceClassification):
    """One score for each text."""

    def __init__(self, config: SpadeConfig):
        self._check_config(config)
        if config.paired_input:
            raise ValueError("paired_input=True compares two texts, where SpadeForMultipleChoice scores each.")
        super().__init__(config)


@auto_docstring
class SpadeForTokenClassification(StackOfCheckpoint, classifiers.TokenClassificationHead, SpadePreTrainedModel):
    """Over the bidirectional encoder, or over the causal stack of a language model."""

    base_model_class = staticmethod(classified_stack)
    _keys_to_ignore_on_load_unexpected = NOT_OF_THE_ENCODER


@auto_docstring
class SpadeForQuestionAnswering(StackOfCheckpoint, classifiers.QuestionAnsweringHead, SpadePreTrainedModel):
    """Over the bidirectional encoder, or over the causal stack of a language model."""

    base_model_class = staticmethod(classified_stack)
    _keys_to_ignore_on_load_unexpected = NOT_OF_THE_ENCODER


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
    "SpadeForMaskedLM",
    "SpadeForMultipleChoice",
    "SpadeForQuestionAnswering",
    "SpadeForSequenceClassification",
    "SpadeForTokenClassification",
    "SpadeModel",
    "SpadePreTrainedModel",
]
