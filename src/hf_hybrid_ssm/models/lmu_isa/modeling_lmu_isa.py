# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""PyTorch LMU-ISA model (arXiv 2110.02402)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import auto_docstring

from hf_hybrid_ssm.layers.feed_forward import FeedForward
from hf_hybrid_ssm.layers.local_self_attention import LocalSelfAttention
from hf_hybrid_ssm.models import classifiers
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.heads import CausalLMHead
from hf_hybrid_ssm.models.lmu_isa.configuration_lmu_isa import LmuIsaConfig
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.implicit_attention import implicit_attention, memory_state, named_memory


class ImplicitAttention(nn.Module):
    """Attention among a token's own polynomial coefficients, reduced to q' of them (equations 8 to 11).

    Args:
        order: q.
        reduced_order: q'.
        theta: window of the memory, in tokens.
        activation: of queries, keys and values.
        scale: of the logits.
        bias: a bias for each row of the reductions, and one of the output.
    """

    def __init__(
        self,
        order: int,
        reduced_order: int,
        theta: float,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor],
        scale: float = 1.0,
        bias: bool = True,
    ):
        super().__init__()
        self.theta, self.activation, self.scale = theta, activation, scale
        self.reduce_weight = nn.Parameter(torch.empty(3, reduced_order, order))
        self.reduce_bias = nn.Parameter(torch.empty(3, reduced_order)) if bias else None
        self.collapse_weight = nn.Parameter(torch.empty(reduced_order))
        self.collapse_bias = nn.Parameter(torch.empty(1)) if bias else None
        self.set_initial_values()

    def set_initial_values(self) -> None:
        """Reductions and collapse keep the scale of what they read; the logits of the attention are not scaled."""
        _, reduced, order = self.reduce_weight.shape
        init.normal_(self.reduce_weight, std=order**-0.5)
        init.normal_(self.collapse_weight, std=reduced**-0.5)
        for bias in (self.reduce_bias, self.collapse_bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(self, x: torch.Tensor, past: States, rows: Rows = PLAIN_ROWS) -> tuple[torch.Tensor, States]:
        """(B, L, D), the states before it → (B, L, D), the states after it."""
        parameters = (self.reduce_weight, self.reduce_bias, self.collapse_weight, self.collapse_bias)
        names = ("weight", "bias", "collapse", "collapse_bias")
        options: dict[str, Any] = {name: None if p is None else p.to(x.dtype) for name, p in zip(names, parameters)}
        options |= {"theta": self.theta, "scale": self.scale, "activation": self.activation}
        y, after = implicit_attention(x, **options, rows=rows, initial_state=memory_state(past))
        return y, named_memory(after, x, self.activation)


def _attention(config: LmuIsaConfig) -> LocalSelfAttention:
    """Causal, to all tokens or a window, without positions: the memory knows the order."""
    left = None
    if config.first_sublayer == "window_attention":
        assert config.sliding_window is not None  # `LmuIsaConfig` refuses such layers without it
        left = config.sliding_window - 1
    options: dict[str, Any] = {"bias": config.use_bias, "dropout": config.attention_dropout}
    return LocalSelfAttention(config.hidden_size, config.num_attention_heads, window=(left, 0), **options)


def _feed_forward(config: LmuIsaConfig, width: int) -> FeedForward:
    return FeedForward(config.hidden_size, width, ACT2FN[config.hidden_act], bias=config.use_bias)


class LmuIsaBlock(RecurrentMixin, GradientCheckpointingLayer):
    """x + FFN or attention, x + implicit attention over the memory, x + FFN, each after a LayerNorm (figure 2)."""

    def __init__(self, config: LmuIsaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        norm = (config.hidden_size, config.layer_norm_epsilon)
        self.pre_norm, self.memory_norm, self.post_norm = (nn.LayerNorm(*norm) for _ in range(3))
        self.attention = None if config.first_sublayer == "ffn" else _attention(config)
        if self.attention is None:
            self.pre_feed_forward = _feed_forward(config, config.pre_intermediate_size)
        self.memory = ImplicitAttention(
            config.lmu_order,
            config.lmu_reduced_order,
            config.lmu_theta,
            activation=ACT2FN[config.hidden_act],
            scale=config.attention_scale,
            bias=config.use_bias,
        )
        self.post_feed_forward = _feed_forward(config, config.post_intermediate_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward_rows(self, x: torch.Tensor, *, past: States, rows: Rows) -> tuple[torch.Tensor, States]:
        """The first two branches."""
        states: States = {}
        if self.attention is not None:
            first, states = self.attention(self.pre_norm(x), past, rows=rows)
        else:
            first = self.pre_feed_forward(self.pre_norm(x))
        x = x + self.dropout(first)
        y, memory = self.memory(self.memory_norm(x), past, rows)
        return x + self.dropout(y), states | memory

    def forward(
        self, hidden_states: torch.Tensor, rows: PackedRows | None = None, cache: Cache | None = None
    ) -> torch.Tensor:
        hidden_states = self.forward_with_cache(hidden_states, rows=rows, cache=cache)
        return hidden_states + self.dropout(self.post_feed_forward(self.post_norm(hidden_states)))


@auto_docstring
class LmuIsaPreTrainedModel(HybridPreTrainedModel):
    config: LmuIsaConfig
    _no_split_modules = ["LmuIsaBlock"]
    _can_record_outputs = {"hidden_states": LmuIsaBlock}

    def _why_no_attentions(self) -> str | None:
        no_attention = self.config.first_sublayer == "ffn"
        return "no token attends to another" if no_attention else super()._why_no_attentions()


@auto_docstring
class LmuIsaModel(HybridModelMixin, LmuIsaPreTrainedModel):
    def __init__(self, config: LmuIsaConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LmuIsaBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self.post_init()


@auto_docstring
class LmuIsaForCausalLM(CausalLMHead, LmuIsaPreTrainedModel, GenerationMixin):
    base_model_class = LmuIsaModel


@auto_docstring
class LmuIsaForSequenceClassification(classifiers.SequenceClassificationHead, LmuIsaPreTrainedModel):
    base_model_class = LmuIsaModel


@auto_docstring
class LmuIsaForMultipleChoice(classifiers.MultipleChoiceHead, LmuIsaForSequenceClassification):
    """One score for each text."""


@auto_docstring
class LmuIsaForTokenClassification(classifiers.TokenClassificationHead, LmuIsaPreTrainedModel):
    base_model_class = LmuIsaModel


@auto_docstring
class LmuIsaForQuestionAnswering(classifiers.QuestionAnsweringHead, LmuIsaPreTrainedModel):
    base_model_class = LmuIsaModel


__all__ = [
    "LmuIsaForCausalLM",
    "LmuIsaForMultipleChoice",
    "LmuIsaForQuestionAnswering",
    "LmuIsaForSequenceClassification",
    "LmuIsaForTokenClassification",
    "LmuIsaModel",
    "LmuIsaPreTrainedModel",
]
