# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""PyTorch Block-State Transformer (arXiv 2306.09539)."""

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import auto_docstring

from hf_hybrid_ssm.layers.feed_forward import FeedForward
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.layers.truncated_normal import truncated_normal
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.bst.attention import ContextAttention, RecurrentAttention, StateAttention, WindowAttention
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates, HeadwiseLinear
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.bst.retrieval import RetrievingAttention
from hf_hybrid_ssm.models.cache import States
from hf_hybrid_ssm.models.heads import (
    CausalLMHead,
    LMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_hybrid_ssm.models.packing import PackedRows
from hf_hybrid_ssm.ops.core.rows import Rows

# of the states before the first block, and of the IDs that tell states apart, as Block-Recurrent Transformers
INITIAL_CONTEXT_STD, CONTEXT_ID_STD = 0.1, 1.0


def _attention(config: BstConfig, kind: str) -> WindowAttention:
    """What a layer of this type attends with."""
    if kind == "bst":
        return ContextAttention(config) if config.retrieval_k is None else RetrievingAttention(config)
    return RecurrentAttention(config) if kind == "block_recurrent" else WindowAttention(config)


class BstBlock(RecurrentMixin, GradientCheckpointingLayer):
    """x + attention(dropout(norm(x))), x + dropout(feed-forward(norm(x)))."""

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = _attention(config, config.layer_types[layer_idx])
        self.feed_forward_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        sizes = config.hidden_size, config.intermediate_size
        self.feed_forward = FeedForward(*sizes, ACT2FN[config.hidden_act], bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward_rows(self, x: torch.Tensor, *, past: States, rows: Rows) -> tuple[torch.Tensor, States]:  # type: ignore[override]
        normed = self.attention_norm(x)
        return self.attention(self.dropout(normed) if self.training else normed, x, past, rows)

    def forward(self, x: torch.Tensor, rows: PackedRows | None = None, cache: Cache | None = None) -> torch.Tensor:
        x = x + self.forward_with_cache(x, rows=rows, cache=cache)
        y = self.feed_forward(self.feed_forward_norm(x))
        return x + (self.dropout(y) if self.training else y)


@auto_docstring
class BstPreTrainedModel(HybridPreTrainedModel):
    config: BstConfig
    _no_split_modules = ["BstBlock"]
    _can_record_outputs = {"hidden_states": BstBlock}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Truncated normal maps of variance 1 / fan-in, as Block-Recurrent Transformers; filters as their papers."""
        if isinstance(module, RelativeBias):
            init.normal_(module.weight, std=module.num_embeddings**-0.5)
        elif isinstance(module, HeadwiseLinear):
            init.trunc_normal_(module.weight, **truncated_normal(1 / module.in_features))
        elif isinstance(module, ContextStates) and module.variant == "mf":
            init.normal_(module.initial_context, std=INITIAL_CONTEXT_STD)
            init.normal_(module.context_ids, std=CONTEXT_ID_STD)
        elif isinstance(module, RecurrentStates):
            init.normal_(module.initial_state, std=INITIAL_CONTEXT_STD)
            init.normal_(module.state_ids, std=CONTEXT_ID_STD)
            init.normal_(module.gate, std=0.1)
            for scale in (module.scale, module.token_scale):
                if scale is not None:
                    init.ones_(scale)
        elif isinstance(module, WindowAttention):
            for scale in (module.scale, module.context_scale if isinstance(module, StateAttention) else None):
                if scale is not None:
                    init.ones_(scale)
        elif isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, **truncated_normal(1 / module.in_features))
            if module.bias is not None:  # of a classifier
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        else:
            super()._init_weights(module)


@auto_docstring
class BstModel(HybridModelMixin, BstPreTrainedModel):
    def __init__(self, config: BstConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BstBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.is_bidirectional = config.bidirectional
        # the more documents, the more blocks
        kinds, has_memory = set(config.layer_types), config.retrieval_k is not None
        is_block_by_block = "bst" in kinds and (config.context_variant == "mf" or has_memory)
        self.counts_documents = "block_recurrent" in kinds or is_block_by_block
        self.gradient_checkpointing = False
        self.post_init()


class BstLMHead(LMHead):
    """The head of language models, causal or masked: dropout and a factor on the logits."""

    needs_bidirectional: bool

    def __init__(self, config: BstConfig):
        super().__init__(config)
        if config.bidirectional != self.needs_bidirectional:
            reason = "predicts a token from both sides" if self.needs_bidirectional else "must not see the future"
            raise ValueError(
                f"{type(self).__name__} needs bidirectional={self.needs_bidirectional}, got bidirectional="
                f"{config.bidirectional}: it {reason}."
            )
        self.dropout = nn.Dropout(config.final_dropout)

    def _pre_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.dropout(hidden_states) * self.config.logit_scale


@auto_docstring
class BstForCausalLM(BstLMHead, CausalLMHead, BstPreTrainedModel, GenerationMixin):
    model: BstModel
    base_model_class = BstModel
    needs_bidirectional = False


@auto_docstring
class BstForMaskedLM(BstLMHead, MaskedLMHead, BstPreTrainedModel):
    """Needs `bidirectional=True`."""

    base_model_class = BstModel
    needs_bidirectional = True


@auto_docstring
class BstForSequenceClassification(SequenceClassificationHead, BstPreTrainedModel):
    base_model_class = BstModel


@auto_docstring
class BstForMultipleChoice(MultipleChoiceHead, BstForSequenceClassification):
    """One score for each text."""


@auto_docstring
class BstForTokenClassification(TokenClassificationHead, BstPreTrainedModel):
    base_model_class = BstModel


@auto_docstring
class BstForQuestionAnswering(QuestionAnsweringHead, BstPreTrainedModel):
    base_model_class = BstModel


__all__ = [
    "BstForCausalLM",
    "BstForMaskedLM",
    "BstForMultipleChoice",
    "BstForQuestionAnswering",
    "BstForSequenceClassification",
    "BstForTokenClassification",
    "BstModel",
    "BstPreTrainedModel",
]
