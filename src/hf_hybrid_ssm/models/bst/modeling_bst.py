"""PyTorch Block-State Transformer (arXiv 2306.09539)."""

from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import auto_docstring

from hf_hybrid_ssm.layers.feed_forward import FeedForward
from hf_hybrid_ssm.layers.l2_normalise import l2_normalise
from hf_hybrid_ssm.layers.offloaded import with_accelerate_hooks
from hf_hybrid_ssm.layers.relative_bias import RelativeBias
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.layers.truncated_normal import truncated_normal
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.bst.block_grid import AlignedGrid, FreeGrid, block_grid
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.bst.context_states import (
    ContextStates,
    HeadwiseLinear,
    attend_context,
    newest_last,
    slot_by_slot,
)
from hf_hybrid_ssm.models.bst.recurrent_states import RecurrentStates
from hf_hybrid_ssm.models.bst.retrieval import attend_with_memory
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
from hf_hybrid_ssm.ops.local_attention import AttentionState, local_attention, window_step


class BstAttention(nn.Module):
    """Attention to the W tokens before; beside it, in a "bst" layer to the context states of the block, in a
    "block_recurrent" layer to its recurrent states.

    Queries and keys are L2-normalised; each head has a learned scale, and T5's bias lies inside it, as in the token
    branch of Block-Recurrent Transformers (arXiv 2203.07852), whose official code has it so.
    """

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.num_heads, self.head_dim, self.window = config.num_attention_heads, config.head_dim, config.sliding_window
        self.qk_norm, self.dropout = config.qk_norm, config.attention_dropout
        self.is_bidirectional = config.bidirectional
        self.right = config.sliding_window if config.bidirectional else 0 if config.attend_self else -1
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
        block_type = config.block_types[layer_idx]
        if block_type == "bst":
            self.context = ContextStates(config)
            self.retrieval: dict[str, int] | None = None
            if config.retrieval_k is not None:
                self.retrieval = {"top_k": config.retrieval_k, "capacity": config.retrieval_memory}
                self.retrieval["stride"] = config.retrieval_stride
            inclusive = "causal" if config.cross_attention_inclusive else "strict"
            self.context_mask = None if config.context_variant == "mf" else inclusive
        elif block_type == "block_recurrent":
            self.recurrent = RecurrentStates(config)
        if block_type != "sliding_attention":
            self.context_q_proj = nn.Linear(width, inner, bias=False)
            self.context_scale = nn.Parameter(torch.ones(self.num_heads)) if config.qk_norm else None
        self.o_proj = nn.Linear(inner if block_type == "sliding_attention" else 2 * inner, width, bias=False)

    def forward(
        self, z: torch.Tensor, x: torch.Tensor, past: States, *, documents: int | None = None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d) normalised and raw inputs, the states before them → (B, L, d), the states after them.

        Args:
            documents: as of `block_grid`.
            options: as of `RecurrentMixin.mix`.
        """
        q, k, v = (layer(z).unflatten(2, (self.num_heads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        bias = self.relative_bias(self.window)
        if self.scale is not None:
            scale = self.scale.abs().to(q.dtype)
            q, k, bias = l2_normalise(q) * scale.unsqueeze(1), l2_normalise(k), bias * scale.unsqueeze(1)
        y, state = local_attention(
            *(part.transpose(1, 2) for part in (q, k, v)),
            window=(self.window, self.right),
            bias=bias,
            scale=1.0 if self.qk_norm else None,
            zero_kv_sink=self.zero_kv_sink,
            dropout=self.dropout if self.training else 0.0,
            initial_state=AttentionState(*(past[name] for name in AttentionState._fields)) if past else None,
            **options,
        )
        y = y.transpose(1, 2)
        states: States = {} if state is None else state._asdict()
        if self.context is not None:
            crossed, more = self._attend_context(z, x, past, documents=documents, **options)
        elif self.recurrent is not None:
            crossed, more = self._attend_recurrent(z, k, v, past, documents=documents, **options)
        else:
            return self.o_proj(y.flatten(2)), states
        return self.o_proj(torch.cat([y.flatten(2), crossed.flatten(2)], dim=2)), states | more

    def _attend_context(
        self,
        z: torch.Tensor,
        x: torch.Tensor,
        past: States,
        *,
        documents: int | None = None,
        seq_idx: torch.Tensor | None,
        lengths: torch.Tensor | None,
        return_final_state: bool,
    ) -> tuple[torch.Tensor, States]:
        """(B, L, H, e) what the tokens find in the context states of their blocks (equations 3.3 and 3.4)."""
        queries = self._context_queries(z)
        if (past or seq_idx is not None) and self.context_mask is not None and self.retrieval is None:
            options = {"seq_idx": seq_idx, "lengths": lengths, "return_final_state": return_final_state}
            return self._attend_context_along_rows(queries, x, past, options)
        grid = self._grid(x, past, seq_idx, lengths, documents)
        keys, values, states = self.context(
            x, grid, state=past or None, seq_idx=seq_idx, lengths=lengths, return_state=return_final_state
        )
        if self.retrieval is not None:
            blocks = grid.to_blocks(queries)
            found, memory = attend_with_memory(
                blocks, keys, values, grid, past or None, causal=self.context_mask, **self.retrieval
            )
            return grid.from_blocks(found), states | memory if return_final_state else {}
        mask = grid.slot_mask if self.is_bidirectional else self.context_mask
        blocks = attend_context(grid.to_blocks(queries), keys, values, mask=mask)
        return grid.from_blocks(blocks), states

    def _attend_context_along_rows(
        self, queries: torch.Tensor, x: torch.Tensor, past: States, options: dict[str, Any]
    ) -> tuple[torch.Tensor, States]:
        """The same where blocks begin anywhere: a block's tokens and its states are the same columns of the row."""
        keys, values, ssm = self.context.along_rows(
            x,
            state=past or None,
            seq_idx=options["seq_idx"],
            lengths=options["lengths"],
            return_state=options["return_final_state"],
        )
        state = None
        if past:
            held = [newest_last(past[name], past["seen"]) for name in ("context_key", "context_value")]
            state = AttentionState(held[0], held[1], past["seen"])
        right = self.window - 1 if self.is_bidirectional else 0 if self.context_mask == "causal" else -1
        y, after = local_attention(
            *(part.transpose(1, 2) for part in (queries, keys, values)),
            window=(self.window - 1, right),
            chunk_size=self.window,
            scale=1.0,
            initial_state=state,
            capacity=self.window,
            **options,
        )
        states: States = {}
        if after is not None:
            unfinished = (slot_by_slot(part, after.seen) for part in (after.keys, after.values))
            states = self.context.named_states(ssm, *unfinished)
        return y.transpose(1, 2), states

    def _grid(
        self,
        x: torch.Tensor,
        past: States,
        seq_idx: torch.Tensor | None,
        lengths: torch.Tensor | None,
        documents: int | None,
    ) -> AlignedGrid | FreeGrid:
        """Where the tokens of x (B, L, d) lie in the blocks of their documents."""
        seen = past["seen"] if past else None
        options: dict[str, Any] = {"seq_idx": seq_idx, "lengths": lengths, "documents": documents, "device": x.device}
        return block_grid(x.shape[0], x.shape[1], self.window, tokens_seen=seen, **options)

    def _context_queries(self, z: torch.Tensor) -> torch.Tensor:
        """(B, L, H, e), scaled."""
        queries = self.context_q_proj(z).unflatten(2, (self.num_heads, -1))
        if self.context_scale is None:
            return queries * self.head_dim**-0.5
        return l2_normalise(queries) * self.context_scale.abs().to(queries.dtype).unsqueeze(1)

    def _attend_recurrent(
        self,
        z: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        past: States,
        *,
        documents: int | None = None,
        seq_idx: torch.Tensor | None,
        lengths: torch.Tensor | None,
        return_final_state: bool,
    ) -> tuple[torch.Tensor, States]:
        """(B, L, H, e) what the tokens find in the state their block began with."""
        grid = self._grid(z, past, seq_idx, lengths, documents)
        state = past or None
        state_keys, state_values, after = self.recurrent(keys, values, grid, state, return_state=return_final_state)
        blocks = attend_context(grid.to_blocks(self._context_queries(z)), state_keys, state_values, mask=None)
        return grid.from_blocks(blocks), after

    @with_accelerate_hooks
    def step(
        self, z: torch.Tensor, x: torch.Tensor, past: States, *, keeps_address: bool
    ) -> tuple[torch.Tensor, States]:
        """`forward` of one token (B, 1, d) after earlier ones, without gradients; `past` is overwritten."""
        heads = (x.shape[0], self.num_heads, self.head_dim)
        q, k, v = (layer(z).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        states, crossed = dict(past), None
        scale = 1.0 if self.qk_norm else None
        if self.context is not None:
            queries, right = self.context_q_proj(z).view(heads), 0 if self.context_mask == "causal" else -1
            scales: dict[str, Any] = {"scale": scale, "head_scale": self.context_scale}
            crossed, more = self.context.step(queries, x[:, 0], past, right=right, **scales)
            states |= more
        elif self.recurrent is not None:
            queries, scales = self.context_q_proj(z).view(heads), {"scale": scale, "head_scale": self.context_scale}
            key = k if self.scale is None else l2_normalise(k)
            crossed, more = self.recurrent.step(queries, key, v, past, **scales)
            states |= more
        y, state = window_step(
            q,
            k,
            v,
            AttentionState(past["keys"], past["values"], past["seen"]),
            keeps_address=keeps_address,
            window=(self.window, self.right),
            bias=self.relative_bias(self.window),
            scale=scale,
            head_scale=self.scale,
            zero_kv_sink=self.zero_kv_sink,
        )
        y = y if crossed is None else torch.cat([y.flatten(1), crossed.flatten(1)], 1)
        return self.o_proj(y.flatten(1).unsqueeze(1)), states | state._asdict()


class BstBlock(RecurrentMixin, GradientCheckpointingLayer):
    """x + attention(dropout(norm(x))), x + dropout(feed-forward(norm(x)))."""

    def __init__(self, config: BstConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = BstAttention(config, layer_idx)
        self.feed_forward_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.feed_forward = FeedForward(
            config.hidden_size, config.intermediate_size, ACT2FN[config.hidden_act], bias=False
        )
        self.dropout = nn.Dropout(config.dropout)

    def mix(self, x: torch.Tensor, *, capacity: int | None, **options: Any) -> tuple[torch.Tensor, States]:
        return self.attention(self.dropout(self.attention_norm(x)), x, **options)

    def step(  # type: ignore[override]
        self, x: torch.Tensor, *, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        if self.attention.context is not None and self.attention.retrieval is not None:
            return super().step(x, past=past, capacity=capacity, **options)
        return self.attention.step(self.attention_norm(x), x, past, keeps_address=capacity is not None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows | None = None,
        documents: int | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        options = {"rows": rows, "documents": documents, "past_key_values": past_key_values}
        hidden_states = hidden_states + self.mix_with_cache(hidden_states, **options)
        y = self.feed_forward(self.feed_forward_norm(hidden_states))
        return hidden_states + (self.dropout(y) if self.training else y)


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
            init.normal_(module.initial_context, std=self.config.context_init_std)
            init.normal_(module.context_ids, std=self.config.context_id_std)
        elif isinstance(module, RecurrentStates):
            init.normal_(module.initial_state, std=self.config.context_init_std)
            init.normal_(module.state_ids, std=self.config.context_id_std)
            init.normal_(module.gate, std=0.1)
            for scale in (module.scale, module.token_scale):
                if scale is not None:
                    init.ones_(scale)
        elif isinstance(module, BstAttention):
            for scale in (module.scale, getattr(module, "context_scale", None)):
                if scale is not None:
                    init.ones_(scale)
        elif isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, **truncated_normal(1 / module.in_features))
            if module.bias is not None:  # of the heads; the layers have none
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
        self.gradient_checkpointing = False
        self.post_init()

    def _run_layers(
        self, hidden_states: torch.Tensor, rows: PackedRows, past_key_values: Cache | None, **kwargs: Any
    ) -> torch.Tensor:
        # the more documents, the more blocks: where a layer has to know how many, they are counted here, once
        kinds, has_memory = set(self.config.block_types), self.config.retrieval_k is not None
        counts = "block_recurrent" in kinds or ("bst" in kinds and (self.config.context_variant == "mf" or has_memory))
        documents = rows.most_documents() if counts else None
        return self._through_layers(hidden_states, rows, documents, past_key_values=past_key_values)


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
