"""PyTorch LMU-ISA model (arXiv 2110.02402)."""

from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import auto_docstring
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_hybrid_ssm.models.attentions import IN_BLOCKS, refuse_attentions
from hf_hybrid_ssm.models.cache import STATE_LAYER_TYPE, prepare_cache
from hf_hybrid_ssm.models.configuration import check_config_class
from hf_hybrid_ssm.models.heads import (
    CausalLMHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_hybrid_ssm.models.inputs import check_inputs
from hf_hybrid_ssm.models.lmu_isa.configuration_lmu_isa import LmuIsaConfig
from hf_hybrid_ssm.models.lmu_isa.lmu import ImplicitAttention
from hf_hybrid_ssm.models.packing import resolve_packing
from hf_hybrid_ssm.models.parallel_plans import MatchingPlans
from hf_hybrid_ssm.models.saving import SavesCode
from hf_hybrid_ssm.models.unpadding import Unpadding, unpadding_of
from hf_hybrid_ssm.ops.local_attention import AttentionState, local_attention

States = dict[str, torch.Tensor]
ATTENTION_STATES = ("keys", "values", "seen")


class LmuIsaFeedForward(nn.Module):
    """W_2 act(W_1 x + b_1) + b_2."""

    def __init__(self, config: LmuIsaConfig, width: int):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, width, bias=config.use_bias)
        self.fc2 = nn.Linear(width, config.hidden_size, bias=config.use_bias)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class LmuIsaAttention(nn.Module):
    """Causal attention before the memory, to all tokens or a window, without positions: the memory knows the order."""

    def __init__(self, config: LmuIsaConfig):
        super().__init__()
        width, bias = config.hidden_size, config.use_bias
        self.num_heads, self.dropout = config.num_attention_heads, config.attention_dropout
        self.farthest = config.sliding_window - 1 if config.first_sublayer == "window_attention" else None
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(
        self, x: torch.Tensor, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """(B, L, d), the states before it → (B, L, d), the states after it; `options` are those of the op."""
        q, k, v = (
            projection(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y, state = local_attention(
            q,
            k,
            v,
            nearest=0,
            farthest=self.farthest,
            dropout=self.dropout if self.training else 0.0,
            initial_state=AttentionState(*(past[name] for name in ATTENTION_STATES)) if past else None,
            capacity=capacity if self.farthest is None else None,
            **options,
        )
        return self.o_proj(y.transpose(1, 2).flatten(2)), {} if state is None else state._asdict()


class LmuIsaBlock(GradientCheckpointingLayer):
    """x + FFN or attention, x + implicit attention over the memory, x + FFN, each behind a LayerNorm (figure 2)."""

    def __init__(self, config: LmuIsaConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        norm = (config.hidden_size, config.layer_norm_epsilon)
        self.pre_norm, self.memory_norm, self.post_norm = (nn.LayerNorm(*norm) for _ in range(3))
        self.attention = LmuIsaAttention(config) if config.first_sublayer != "ffn" else None
        self.pre_feed_forward = None
        if config.first_sublayer == "ffn":
            self.pre_feed_forward = LmuIsaFeedForward(config, config.pre_intermediate_size)
        self.memory = ImplicitAttention(
            config.lmu_order,
            config.lmu_reduced_order,
            config.lmu_theta,
            activation=ACT2FN[config.hidden_act],
            scale=config.attention_scale,
            form=config.conv_mode,
            bias=config.use_bias,
        )
        self.post_feed_forward = LmuIsaFeedForward(config, config.post_intermediate_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        x, lengths = hidden_states, None
        if unpadding is not None:
            x, lengths = unpadding.unpad(x), unpadding.lengths
            seq_idx = None if seq_idx is None else unpadding.unpad(seq_idx).cummax(1).values
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        past: States = {} if cache is None else cache.states
        capacity = getattr(cache, "max_cache_len", None)
        options: dict[str, Any] = {"seq_idx": seq_idx, "lengths": lengths, "return_final_state": cache is not None}
        mixed, states = self._mix(x, past, capacity, options)
        if cache is not None:

            def recompute(num_tokens: int) -> States:
                kept = {
                    "seq_idx": None if seq_idx is None else seq_idx[:, :num_tokens],
                    "lengths": None if unpadding is None else unpadding.lengths_of_first(num_tokens),
                }
                return self._mix(x[:, :num_tokens], past, capacity, options | kept)[1]

            cache.update_states(x.shape[1], states, recompute)
        hidden_states = mixed if unpadding is None else unpadding.repad(mixed)
        return hidden_states + self.dropout(self.post_feed_forward(self.post_norm(hidden_states)))

    def _mix(
        self, x: torch.Tensor, past: States, capacity: int | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, States]:
        """The first two branches, on rows whose real tokens come first."""
        states: States = {}
        if self.pre_feed_forward is not None:
            first = self.pre_feed_forward(self.pre_norm(x))
        else:
            attention_past = {name: past[name] for name in ATTENTION_STATES} if past else {}
            first, states = self.attention(self.pre_norm(x), attention_past, capacity, **options)
        x = x + self.dropout(first)
        y, memory = self.memory(self.memory_norm(x), initial_state=past.get("memory"), **options)
        return x + self.dropout(y), states if memory is None else states | {"memory": memory}


@auto_docstring
class LmuIsaPreTrainedModel(MatchingPlans, SavesCode):
    config: LmuIsaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LmuIsaBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LmuIsaBlock}

    def __init__(self, config: LmuIsaConfig, *args: Any, **kwargs: Any):
        check_config_class(self, config)
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Reductions and collapse keep the scale of what they read; the logits of the attention are not scaled."""
        super()._init_weights(module)
        if isinstance(module, ImplicitAttention):
            _, reduced, order = module.reduce_weight.shape
            init.normal_(module.reduce_weight, std=order**-0.5)
            init.normal_(module.collapse_weight, std=reduced**-0.5)
            if module.reduce_bias is not None:
                init.zeros_(module.reduce_bias)
                init.zeros_(module.collapse_bias)


@auto_docstring
class LmuIsaModel(LmuIsaPreTrainedModel):
    def __init__(self, config: LmuIsaConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LmuIsaBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
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
            The document each token of a packed row belongs to; memory and attention do not cross documents.
        cu_seq_lens_q (`torch.IntTensor` of shape `(documents + 1,)`, *optional*):
            Where the documents of a single packed row begin and end, instead of `seq_idx`.
        continues_documents (`bool`, *optional*, defaults to `False`):
            The first tokens go on with the documents in `past_key_values`, as they do in each step of `generate`.
        """
        reason = "no token attends to another" if self.config.first_sublayer == "ffn" else IN_BLOCKS
        refuse_attentions(self.config, kwargs.get("output_attentions"), reason)
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
        hidden_states = inputs_embeds
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer while generation exits early
            hidden_states = layer(hidden_states, unpadding, packed.seq_idx, past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )


@auto_docstring
class LmuIsaForCausalLM(CausalLMHead, LmuIsaPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LmuIsaConfig):
        super().__init__(config)
        self.model = LmuIsaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, **kwargs) -> dict:
        """Masks made ahead of compiled decoding; a generated token is never padding."""
        return {STATE_LAYER_TYPE: None if inputs_embeds.shape[1] == 1 else attention_mask}


@auto_docstring
class LmuIsaForSequenceClassification(SequenceClassificationHead, LmuIsaPreTrainedModel):
    def __init__(self, config: LmuIsaConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LmuIsaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


@auto_docstring
class LmuIsaForTokenClassification(TokenClassificationHead, LmuIsaPreTrainedModel):
    base_model_class = LmuIsaModel


@auto_docstring
class LmuIsaForQuestionAnswering(QuestionAnsweringHead, LmuIsaPreTrainedModel):
    base_model_class = LmuIsaModel


__all__ = [
    "LmuIsaForCausalLM",
    "LmuIsaForQuestionAnswering",
    "LmuIsaForSequenceClassification",
    "LmuIsaForTokenClassification",
    "LmuIsaModel",
    "LmuIsaPreTrainedModel",
]
