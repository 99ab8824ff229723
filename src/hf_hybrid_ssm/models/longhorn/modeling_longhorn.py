"""PyTorch Longhorn model (arXiv 2407.14207)."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import auto_docstring
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_hybrid_ssm.layers.feed_forward import SwiGLU
from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
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
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.longhorn.short_convolution import ShortConvolution
from hf_hybrid_ssm.models.packing import PackedRows, resolve_packing
from hf_hybrid_ssm.models.parallel_plans import MatchingPlans
from hf_hybrid_ssm.models.saving import SavesCode
from hf_hybrid_ssm.models.unpadding import Unpadding, unpadding_of
from hf_hybrid_ssm.ops.local_attention import AttentionState, local_attention, push
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

SCAN_NORM_EPSILON = 1e-6


class LonghornMixer(Float32ParametersMixin):
    """The Longhorn block: projections, short convolution, and the online-recall scan (section 3, algorithm 1).

    x, z = in_proj(u); x = silu(conv(x)); d, k, q = x_proj(x); out_proj(scan(x, dt_proj(d), k, q) · silu(z)).
    """

    float32_parameters = ("D", "dt_bias")

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        channels, rank = config.intermediate_size, int(config.time_step_rank)
        self.projection_sizes = [rank, config.state_size, config.state_size]
        self.in_proj = nn.Linear(config.hidden_size, 2 * channels, bias=config.use_bias)
        self.conv1d = ShortConvolution(channels, config.conv_kernel, bias=config.use_conv_bias)
        self.x_proj = nn.Linear(channels, sum(self.projection_sizes), bias=False)
        self.dt_proj = nn.Linear(rank, channels, bias=False)
        # The scan adds this bias in float32, hence it is no part of `dt_proj`.
        self.dt_bias = nn.Parameter(torch.zeros(channels))
        self.D = nn.Parameter(torch.ones(channels))
        self.scan_norm = RMSNorm(channels, eps=SCAN_NORM_EPSILON) if config.use_scan_norm else None
        self.out_proj = nn.Linear(channels, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Cache | None = None,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(B, L, M) → (B, L, M); the state goes to and comes from `past_key_values.layers[layer_idx]`."""
        lengths = None
        if unpadding is not None:
            hidden_states, lengths = unpadding.unpad(hidden_states), unpadding.lengths
            # padding now follows the last document: let it belong there
            seq_idx = None if seq_idx is None else unpadding.unpad(seq_idx).cummax(1).values
        raw, gate = self.in_proj(hidden_states).chunk(2, dim=-1)  # (B, L, D) each

        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        states = {} if cache is None else cache.states
        convolve = {"initial_state": states.get("conv"), "seq_idx": seq_idx, "lengths": lengths}
        x, conv_state = self.conv1d(raw, return_final_state=cache is not None, **convolve)
        dt, k, q = self.x_proj(x).split(self.projection_sizes, dim=-1)
        scan = {"dt_bias": self.dt_bias, "D": self.D, "initial_state": states.get("scan"), "seq_idx": seq_idx}
        inputs = (x, self.dt_proj(dt), k, q)
        fused_gate = gate if self.scan_norm is None else None
        y, scan_state = longhorn_scan(
            *inputs, z=fused_gate, lengths=lengths, return_final_state=cache is not None, **scan
        )
        if self.scan_norm is not None:
            y = self.scan_norm(y) * F.silu(gate)
        if cache is not None:

            def recompute(num_tokens: int) -> dict[str, torch.Tensor]:
                first = slice(None, num_tokens)
                kept = None if lengths is None else unpadding.lengths_of_first(num_tokens)
                before = {"seq_idx": None if seq_idx is None else seq_idx[:, first], "lengths": kept}
                _, conv = self.conv1d(raw[:, first], return_final_state=True, **(convolve | before))
                _, state = longhorn_scan(*(t[:, first] for t in inputs), return_final_state=True, **(scan | before))
                return {"conv": conv, "scan": state}

            cache.update_states(hidden_states.shape[1], {"conv": conv_state, "scan": scan_state}, recompute)
        y = self.out_proj(y)
        return y if unpadding is None else unpadding.repad(y)


class LonghornRotaryEmbedding(Float32ParametersMixin, LlamaRotaryEmbedding):
    """Llama's rotary positions, whose frequencies a cast of the model does not round.

    No checkpoint holds them: rounded ones would come back exact, and a reloaded model would answer otherwise.
    """

    float32_parameters = ("inv_freq", "original_inv_freq")


class LonghornAttention(nn.Module):
    """Grouped-query attention with rotary positions, for hybrid stacks."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        unpadding: Unpadding | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if unpadding is not None:  # the weight of padding is 0, and 0 times NaN is NaN
            hidden_states = torch.where(unpadding.real.unsqueeze(-1), hidden_states, 0.0)
        queries, keys, values = self._heads(hidden_states, position_embeddings)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), weights

    def _heads(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, heads, L, head_dim)."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        keys = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        values = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
        # under autocast the angles are float32 and would widen what they turn
        return queries.to(values.dtype), keys.to(values.dtype), values


class LonghornSlidingAttention(LonghornAttention):
    """Attention to the last `sliding_window` tokens, the token itself among them; padding takes no place in it."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> tuple[torch.Tensor, None]:
        heads, lengths = self._heads(hidden_states, position_embeddings), None
        if unpadding is not None:
            heads = tuple(unpadding.unpad(x.transpose(1, 2)).transpose(1, 2) for x in heads)
            lengths, seq_idx = (
                unpadding.lengths,
                None if seq_idx is None else unpadding.unpad(seq_idx).cummax(1).values,
            )
        queries, keys, values = heads
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        reach = self.config.sliding_window - 1
        past = AttentionState(**cache.states) if cache is not None and cache.states else None
        output, state = local_attention(
            queries,
            keys,
            values,
            nearest=0,
            farthest=reach,
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            initial_state=past,
            seq_idx=seq_idx,
            lengths=lengths,
            return_final_state=cache is not None,
        )
        if cache is not None:

            def recompute(num_tokens: int) -> dict[str, torch.Tensor]:
                kept = None if lengths is None else unpadding.lengths_of_first(num_tokens)
                documents = None if seq_idx is None else seq_idx[:, :num_tokens]
                first = (keys[:, :, :num_tokens], values[:, :, :num_tokens])
                return push(past, *first, reach, documents, kept)._asdict()

            cache.update_states(hidden_states.shape[1], state._asdict(), recompute)
        output = output.transpose(1, 2).flatten(2)
        return self.o_proj(output if unpadding is None else unpadding.repad(output)), None


class LonghornBlock(GradientCheckpointingLayer):
    """Pre-norm residual layer around a Longhorn mixer or attention, optionally followed by a SwiGLU."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.is_recurrent = config.block_types[layer_idx] == "linear_attention"
        if self.is_recurrent:
            self.mixer = LonghornMixer(config, layer_idx)
        else:
            self.is_sliding = config.block_types[layer_idx] == "sliding_attention"
            attention = LonghornSlidingAttention if self.is_sliding else LonghornAttention
            self.self_attn = attention(config, layer_idx)
        if config.mlp_intermediate_size is None:
            self.mlp = None
        else:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.mlp = SwiGLU(config.hidden_size, config.mlp_intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if self.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = self.norm(hidden_states)
        if self.is_recurrent:
            mixed = self.mixer(normed, past_key_values=past_key_values, unpadding=unpadding, seq_idx=seq_idx)
        elif self.is_sliding:
            mixed, _ = self.self_attn(normed, position_embeddings, unpadding, seq_idx, past_key_values)
        else:
            mixed, _ = self.self_attn(
                normed, position_embeddings, attention_mask, unpadding, past_key_values, **kwargs
            )
        hidden_states = hidden_states + mixed
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return hidden_states


@auto_docstring
class LonghornPreTrainedModel(MatchingPlans, SavesCode):
    config: LonghornConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LonghornBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = list(LonghornMixer.float32_parameters)
    _can_record_outputs = {"hidden_states": LonghornBlock, "attentions": LonghornAttention}

    def __init__(self, config: LonghornConfig, *args: Any, **kwargs: Any):
        check_config_class(self, config)
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """The official initialisation: torch's own for projections and convolution, scaled output projections."""
        super()._init_weights(module)
        if isinstance(module, LonghornMixer):
            init.zeros_(module.dt_bias)
            init.ones_(module.D)
            for projection in (module.in_proj, module.x_proj, module.dt_proj):
                _uniform_fan_in(projection)
            bound = 1 / math.sqrt(module.conv1d.kernel_size[0])
            init.uniform_(module.conv1d.weight, -bound, bound)
            if module.conv1d.bias is not None:
                init.uniform_(module.conv1d.bias, -bound, bound)
            _uniform_fan_in(module.out_proj, self._residual_scale())
        elif isinstance(module, LonghornAttention):
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                _uniform_fan_in(projection)
            _uniform_fan_in(module.o_proj, self._residual_scale())
        elif isinstance(module, SwiGLU):
            _uniform_fan_in(module.gate_proj)
            _uniform_fan_in(module.up_proj)
            _uniform_fan_in(module.down_proj, self._residual_scale())

    def post_init(self):
        super().post_init()
        if not self._gives_attentions():  # the class can, this model cannot
            self._can_record_outputs = {"hidden_states": LonghornBlock}

    def _gives_attentions(self) -> bool:
        """Whether every layer that attends forms a matrix of weights."""
        return set(self.config.block_types) - {"linear_attention"} == {"full_attention"}

    def _residual_scale(self) -> float:
        return 1 / math.sqrt(self.config.num_hidden_layers) if self.config.rescale_prenorm_residual else 1.0


def _uniform_fan_in(linear: nn.Linear, scale: float = 1.0) -> None:
    bound = scale / math.sqrt(linear.in_features)
    init.uniform_(linear.weight, -bound, bound)


@auto_docstring
class LonghornModel(LonghornPreTrainedModel):
    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LonghornBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.has_attention = config.has_attention
        self.rotary_emb = LonghornRotaryEmbedding(config) if self.has_attention else None
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
        if not self._gives_attentions():
            reason = f"window {IN_BLOCKS}" if self.has_attention else "no token attends to another"
            refuse_attentions(self.config, kwargs.get("output_attentions"), reason)
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch, length = inputs_embeds.shape[:2]
        if use_cache or past_key_values is not None:
            past_key_values = prepare_cache(past_key_values, self.config, batch)
        masks = attention_mask if isinstance(attention_mask, dict) else None
        padding = masks[STATE_LAYER_TYPE] if masks is not None else attention_mask
        unpadding = unpadding_of(padding, batch, length)
        inputs = (seq_idx, position_ids, padding, unpadding, past_key_values, batch, length)
        packed = resolve_packing(
            *inputs,
            cu_seq_lens_q=cu_seq_lens_q,
            continues_documents=continues_documents,
            keeps_columns=self.has_attention,
            # prepared masks know of padding, and a note that grows would have every compiled step compiled anew
            keeps_padding=self.has_attention and (masks is None or position_ids is None),
        )
        position_embeddings = None
        if self.has_attention:
            if position_ids is None:
                position_ids = packed.positions(inputs_embeds.device)
            position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
            if masks is None:
                masks = _attention_masks(self.config, inputs_embeds, packed, past_key_values)

        packed.open(past_key_values)
        hidden_states = inputs_embeds
        for layer, layer_type in zip(self.layers, self.config.layer_types):
            hidden_states = layer(
                hidden_states,
                attention_mask=None if masks is None else masks.get(layer_type),
                unpadding=unpadding,
                seq_idx=packed.seq_idx,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )


def _attention_masks(
    config: LonghornConfig, inputs_embeds: torch.Tensor, packed: PackedRows, past_key_values: Cache | None
) -> dict[str, torch.Tensor | None]:
    """The masks of the attention layers, by layer type.

    Documents are told apart by `packed` alone: given positions, the library would look for them a second time.
    """
    if "full_attention" not in config.layer_types:
        return {}
    starts, past = packed.starts, packed.past
    mask = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=packed.real,
        past_key_values=past_key_values,
        allow_is_causal_skip=not inputs_embeds.is_meta,  # it looks at the padding's values
        and_mask_function=None if starts is None else lambda row, head, q, key: key >= starts[row, q - past],
    )
    return {"full_attention": mask}


@auto_docstring
class LonghornForCausalLM(CausalLMHead, LonghornPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        self.model = LonghornModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, past_key_values, position_ids=None, is_first_iteration=False, **kwargs
    ) -> dict:
        """Masks made ahead of compiled decoding; a generated token is never padding."""
        batch, length = inputs_embeds.shape[:2]
        inputs = (None, position_ids, attention_mask, None, past_key_values, batch, length)
        packed = resolve_packing(*inputs, continues_documents=not is_first_iteration, keeps_columns=True)
        packed = replace(packed, real=None if attention_mask is None else attention_mask != 0)
        masks = _attention_masks(config, inputs_embeds, packed, past_key_values)
        return {**masks, STATE_LAYER_TYPE: None if length == 1 else attention_mask}


@auto_docstring
class LonghornForSequenceClassification(SequenceClassificationHead, LonghornPreTrainedModel):
    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = LonghornModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


@auto_docstring
class LonghornForTokenClassification(TokenClassificationHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


@auto_docstring
class LonghornForQuestionAnswering(QuestionAnsweringHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


__all__ = [
    "LonghornForCausalLM",
    "LonghornForQuestionAnswering",
    "LonghornForSequenceClassification",
    "LonghornForTokenClassification",
    "LonghornModel",
    "LonghornPreTrainedModel",
]
