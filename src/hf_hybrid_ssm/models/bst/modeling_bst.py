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
from hf_hybrid_ssm.models import classifiers
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import ContextStates
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.bst.retrieval import RetrievingStates
from hf_hybrid_ssm.models.heads import CausalLMHead, LMHead, MaskedLMHead
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.local_attention import AttentionState, Window, local_attention


class BstAttention(nn.Module):
    """Attention to the W tokens before. In a "bst" layer the tokens also attend to the context states of their blocks
    (equations 3.3 and 3.4), in a "block_recurrent" layer to the recurrent states at the start of their blocks, with
    queries and a scale of their own.

    Queries and keys are L2-normalised; the logits, T5's bias included, are multiplied by a learned scale per head, as
    in the official code of Block-Recurrent Transformers (arXiv 2203.07852).
    """

    def __init__(self, config: BstConfig, block_type: str):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.num_heads, self.head_dim, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.dropout = nn.Dropout(config.attention_dropout)
        right = config.sliding_window if config.bidirectional else 0 if config.attend_self else -1
        self.distances = Window.of((self.window, right))
        self.zero_kv_sink = config.zero_kv_sink and not config.bidirectional
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.relative_bias = RelativeBias(
            self.num_heads,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            bidirectional=config.bidirectional,
        )
        self.scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        self.context: ContextStates | None = None
        self.recurrent: RecurrentStates | None = None
        self.context_scale: nn.Parameter | None = None
        self.has_states = block_type != "window_attention"
        if block_type == "bst":
            self.context = ContextStates(config) if config.retrieval_k is None else RetrievingStates(config)
        elif block_type == "block_recurrent":
            self.recurrent = RecurrentStates(config)
        if self.has_states:
            self.context_q_proj = nn.Linear(width, inner, bias=False)
            if config.qk_norm:
                self.context_scale = nn.Parameter(torch.ones(self.num_heads))
        self.o_proj = nn.Linear(inner * (2 if self.has_states else 1), width, bias=False)

    def set_initial_values(self) -> None:
        for scale in (self.scale, self.context_scale):
            if scale is not None:
                init.ones_(scale)

    def forward(
        self, z: torch.Tensor, x: torch.Tensor, past: States, rows: Rows = PLAIN_ROWS
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d) normalised and raw inputs, the states before them → (B, L, d), the states after them; `past` and
        `rows` as of `RecurrentMixin.forward_rows`."""
        q, k, v = (layer(z).unflatten(2, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        bias, head_scale = self.relative_bias(self.window), self.scale
        if self.scale is not None and not rows.is_step:  # the kernel of a step normalises and scales
            scale = self.scale.abs().to(q.dtype).unsqueeze(1)
            q, k, bias, head_scale = l2_normalise(q) * scale, l2_normalise(k), bias * scale, None
        y, state = local_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            window=self.distances,
            bias=bias,
            scale=None if self.scale is None else 1.0,
            head_scale=head_scale,
            zero_kv_sink=self.zero_kv_sink,
            dropout=self.dropout.p if self.dropout.training else 0.0,
            rows=rows,
            initial_state=AttentionState(past["keys"], past["values"], past["seen"]) if past else None,
        )
        y, states = y.transpose(1, 2).flatten(2), {} if state is None else state._asdict()
        if not self.has_states:
            return self.o_proj(y), states
        queries = self.context_q_proj(z).unflatten(2, (self.num_heads, -1))  # not yet scaled
        if self.recurrent is None:
            assert self.context is not None
            found, after = self.context(queries, x, past, rows, head_scale=self.context_scale)
        else:
            k = l2_normalise(k) if self.scale is not None and rows.is_step else k
            found, after = self.recurrent(queries, k, v, past, rows, head_scale=self.context_scale)
        return self.o_proj(torch.cat([y, found.flatten(2)], 2)), states | after


class BstBlock(RecurrentMixin, GradientCheckpointingLayer):
    """x + attention(dropout(norm(x))), x + dropout(feed-forward(norm(x)))."""

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = BstAttention(config, config.layer_types[layer_idx])
        self.feed_forward_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        sizes = config.hidden_size, config.intermediate_size
        self.feed_forward = FeedForward(*sizes, ACT2FN[config.hidden_act], bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward_rows(self, x: torch.Tensor, *, past: States, rows: Rows) -> tuple[torch.Tensor, States]:
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
        # no padding_idx: the end-of-text token often also pads, and its embedding must be learnt
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
class BstForSequenceClassification(classifiers.SequenceClassificationHead, BstPreTrainedModel):
    base_model_class = BstModel


@auto_docstring
class BstForMultipleChoice(classifiers.MultipleChoiceHead, BstForSequenceClassification):
    """One score for each text."""


@auto_docstring
class BstForTokenClassification(classifiers.TokenClassificationHead, BstPreTrainedModel):
    base_model_class = BstModel


@auto_docstring
class BstForQuestionAnswering(classifiers.QuestionAnsweringHead, BstPreTrainedModel):
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
