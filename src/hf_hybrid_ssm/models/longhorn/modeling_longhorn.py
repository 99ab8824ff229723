# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import auto_docstring
from transformers.utils.generic import is_flash_attention_requested

from hf_hybrid_ssm.layers.feed_forward import SwiGLU
from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.cache import tokens_and_notes
from hf_hybrid_ssm.models.heads import (
    CausalLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.packing import PackedRows, States, resolve_packing
from hf_hybrid_ssm.models.rotary import RotaryEmbedding, rotated
from hf_hybrid_ssm.ops._core.checks import can_read_values
from hf_hybrid_ssm.ops.causal_conv import causal_conv, causal_conv_step
from hf_hybrid_ssm.ops.local_attention import AttentionState, append_to_window, local_attention, window_step
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan, longhorn_step

SCAN_NORM_EPSILON = 1e-6


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of width K followed by SiLU; parameters `weight` (D, 1, K) and `bias` (D,).

    Tokens are (B, L, D) here, unlike in `nn.Conv1d`.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, *, overwritten: torch.Tensor | None = None, **options
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`options` (initial_state, seq_idx, lengths, return_final_state) as of `hf_hybrid_ssm.ops.causal_conv`; for
        one token x (B, D) after earlier ones instead the state that the new one is to overwrite, and its `pages`."""
        if overwritten is not None:
            y = causal_conv_step(x, overwritten, self.weight.squeeze(1), self.bias, activation="silu", **options)
            return y, overwritten
        return causal_conv(x, self.weight.squeeze(1), self.bias, activation="silu", **options)


class LonghornMixer(RecurrentMixin, Float32ParametersMixin):
    """The Longhorn block: projections, short convolution, and the online-recall scan (section 3, algorithm 1).

    x, z = in_proj(u); x = silu(conv(x)); d, k, q = x_proj(x); out_proj(scan(x, dt_proj(d), k, q) · silu(z)).
    """

    float32_parameters = ("D", "dt_bias")
    steps_on_pages = True

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        channels, rank = config.intermediate_size, int(config.time_step_rank)
        self.projection_sizes = [rank, config.state_size, config.state_size]
        self.in_proj = nn.Linear(config.hidden_size, 2 * channels, bias=config.use_bias)
        self.conv1d = ShortConvolution(channels, config.conv_kernel, bias=config.use_conv_bias)
        self.x_proj = nn.Linear(channels, sum(self.projection_sizes), bias=False)
        self.dt_proj = nn.Linear(rank, channels, bias=False)
        # The scan adds this bias in float32, so it is not part of `dt_proj`.
        self.dt_bias = nn.Parameter(torch.zeros(channels))
        self.D = nn.Parameter(torch.ones(channels))
        self.scan_norm = RMSNorm(channels, eps=SCAN_NORM_EPSILON) if config.use_scan_norm else None
        self.out_proj = nn.Linear(channels, config.hidden_size, bias=config.use_bias)

    def forward(
        self, hidden_states: torch.Tensor, rows: PackedRows | None = None, past_key_values: Cache | None = None
    ) -> torch.Tensor:
        """(B, L, M) → (B, L, M)."""
        return self.mix_with_cache(hidden_states, rows=rows, past_key_values=past_key_values)

    def mix(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        raw, gate = self.in_proj(hidden_states).chunk(2, dim=-1)  # (B, L, D) each
        x, conv_state = self.conv1d(raw, initial_state=past.get("conv"), **options)
        dt, k, q = self.x_proj(x).split(self.projection_sizes, dim=-1)
        z = gate if self.scan_norm is None else None
        y, scan_state = longhorn_scan(
            x, self.dt_proj(dt), k, q, beta_bias=self.dt_bias, D=self.D, z=z, initial_state=past.get("scan"), **options
        )
        if self.scan_norm is not None:
            y = self.scan_norm(y) * F.silu(gate)
        states = {} if conv_state is None else {"conv": conv_state, "scan": scan_state}
        return self.out_proj(y), states

    def step(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *, past: States, capacity: int | None, pages: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, States]:
        raw, gate = self.in_proj(hidden_states)[:, 0].chunk(2, dim=-1)  # (B, D) each
        x, _ = self.conv1d(raw, overwritten=past["conv"], pages=pages)
        dt, k, q = self.x_proj(x).split(self.projection_sizes, dim=-1)
        z = gate if self.scan_norm is None else None
        options = {"beta_bias": self.dt_bias, "D": self.D, "z": z, "pages": pages}
        y = longhorn_step(x, self.dt_proj(dt), k, q, past["scan"], **options)
        if self.scan_norm is not None:
            y = self.scan_norm(y) * F.silu(gate)
        return self.out_proj(y).unsqueeze(1), past


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
        bias, eps = config.attention_bias, config.layer_norm_epsilon
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=eps) if config.use_qk_norm else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows.real is not None:  # the weight of padding is 0, and 0 times NaN is NaN
            hidden_states = torch.where(rows.real.unsqueeze(-1), hidden_states, 0.0)
        queries, keys, values = (x.transpose(1, 2) for x in self._heads(hidden_states, position_embeddings))
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        output, weights = self._attend(queries, keys, values, attention_mask, **kwargs)
        return self.o_proj(output), weights

    def _heads(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each (B, L, heads, head_dim)."""
        queries, keys, values = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        return *rotated(queries, keys, position_embeddings, values.dtype), values

    def _attend(self, *heads: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values (B, heads, L, head_dim) and the mask → (B, L, heads · head_dim) and the weights, by
        the attention that the configuration names."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(self, *heads, dropout=dropout, scaling=self.scaling, **options)
        return output.flatten(2), weights


class LonghornSlidingAttention(RecurrentMixin, LonghornAttention):
    """Attention to the last `sliding_window` tokens, including the current one; padding does not count.

    `heads` are queries, keys and values, each (B, L, heads, head_dim).
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        heads = self._heads(hidden_states, position_embeddings)
        return self.mix_with_cache(*heads, rows=rows, past_key_values=past_key_values), None

    def mix(  # type: ignore[override]
        self, *heads: torch.Tensor, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        queries, keys, values = (x.transpose(1, 2) for x in heads)
        if not past and options["seq_idx"] is None and is_flash_attention_requested(self.config):
            # a row's only document from its start; padding comes after all tokens that look back
            output, _ = self._attend(queries, keys, values, None, sliding_window=self.config.sliding_window)
            states = self.states_after(*heads, past=past, **options) if options["return_final_state"] else {}
            return self.o_proj(output), states
        output, state = local_attention(
            queries,
            keys,
            values,
            window=(self.config.sliding_window - 1, 0),
            scale=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            initial_state=AttentionState(**past) if past else None,
            **options,
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), {} if state is None else state._asdict()

    def step(  # type: ignore[override]
        self, *heads: torch.Tensor, past: States, capacity: int | None
    ) -> tuple[torch.Tensor, States]:
        queries, keys, values = (x[:, 0] for x in heads)
        output, state = window_step(
            queries,
            keys,
            values,
            AttentionState(**past),
            keeps_address=capacity is not None,
            window=(self.config.sliding_window - 1, 0),
            scale=self.scaling,
        )
        return self.o_proj(output.flatten(1).unsqueeze(1)), state._asdict()

    def states_after(  # type: ignore[override]
        self,
        *heads: torch.Tensor,
        past: States,
        seq_idx: torch.Tensor | None,
        lengths: torch.Tensor | None,
        **options: Any,
    ) -> States:
        """The last keys and values, without attending."""
        before = AttentionState(**past) if past else None
        keys, values = (x.transpose(1, 2) for x in heads[1:])
        return append_to_window(before, keys, values, self.config.sliding_window - 1, seq_idx, lengths)._asdict()


class LonghornBlock(GradientCheckpointingLayer):
    """Pre-norm residual layer around a Longhorn mixer or attention, optionally followed by a SwiGLU."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        block_type = config.block_types[layer_idx]
        self.is_recurrent = block_type == "linear_attention"
        if self.is_recurrent:
            self.mixer = LonghornMixer(config, layer_idx)
        else:
            attention = LonghornSlidingAttention if block_type == "sliding_attention" else LonghornAttention
            self.self_attn = attention(config, layer_idx)
        if config.mlp_intermediate_size is None:
            self.mlp = None
        else:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.mlp = SwiGLU(config.hidden_size, config.mlp_intermediate_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if self.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = self.norm(hidden_states)
        if self.is_recurrent:
            mixed = self.mixer(normed, rows, past_key_values)
        else:
            mixed, _ = self.self_attn(normed, rows, position_embeddings, attention_mask, past_key_values, **kwargs)
        hidden_states = hidden_states + mixed
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return hidden_states


@auto_docstring
class LonghornPreTrainedModel(HybridPreTrainedModel):
    config: LonghornConfig
    _no_split_modules = ["LonghornBlock"]
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_record_outputs = {"hidden_states": LonghornBlock, "attentions": LonghornAttention}

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

    def post_init(self) -> None:
        super().post_init()
        if self._why_no_attentions() is not None:  # the class can return them, this model cannot
            self._can_record_outputs = {"hidden_states": LonghornBlock}

    def _why_no_attentions(self) -> str | None:
        attending = set(self.config.block_types) - {"linear_attention"}
        if not attending:
            return "no token attends to another"
        return None if attending == {"full_attention"} else f"window {super()._why_no_attentions()}"

    def _residual_scale(self) -> float:
        return 1 / math.sqrt(self.config.num_hidden_layers) if self.config.rescale_prenorm_residual else 1.0


def _uniform_fan_in(linear: nn.Linear, scale: float = 1.0) -> None:
    bound = scale / math.sqrt(linear.in_features)
    init.uniform_(linear.weight, -bound, bound)


@auto_docstring
class LonghornModel(HybridModelMixin, LonghornPreTrainedModel):
    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LonghornBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.has_columns = config.has_attention
        self.rotary_emb = RotaryEmbedding(config) if config.has_attention else None
        self.gradient_checkpointing = False
        self.post_init()

    def _run_layers(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        past_key_values: Cache | None,
        *,
        position_ids: torch.Tensor | None = None,
        masks: dict[str, torch.Tensor | None] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        position_embeddings = mask = None
        if self.rotary_emb is not None:
            if position_ids is None:
                position_ids = rows.positions(hidden_states.device)
            position_embeddings = self.rotary_emb(hidden_states, position_ids)
            if masks is None:
                masks = _attention_masks(self.config, hidden_states, rows, past_key_values)
            mask = masks.get("full_attention")
        inputs = (rows, position_embeddings, mask)
        return self._through_layers(hidden_states, *inputs, past_key_values=past_key_values, **kwargs)


def _attention_masks(
    config: LonghornConfig, inputs_embeds: torch.Tensor, rows: PackedRows, past_key_values: Cache | None
) -> dict[str, torch.Tensor | None]:
    """The masks of the attention layers, by layer type.

    Documents are found by `rows` only: given positions, transformers would look for them again.
    """
    if "full_attention" not in config.layer_types:
        return {}
    starts, past, real = rows.starts, rows.past, rows.real_so_far
    # with a function of positions transformers goes through vmap, which torch.export cannot save
    by_function = starts is not None and config._attn_implementation == "flex_attention"
    mask = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=real,
        past_key_values=past_key_values,
        # it looks at the padding's values
        allow_is_causal_skip=starts is None and not inputs_embeds.is_meta and (real is None or can_read_values(real)),
        and_mask_function=(lambda row, head, q, key: key >= starts[row, q - past]) if by_function else None,
    )
    if starts is not None and isinstance(mask, torch.Tensor) and mask.dim() == 4:
        before = torch.arange(mask.shape[-1], device=mask.device) < starts.unsqueeze(-1)  # of other documents
        mask = mask.masked_fill(
            before.unsqueeze(1), False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        )
    return {"full_attention": mask}


@auto_docstring
class LonghornForCausalLM(CausalLMHead, LonghornPreTrainedModel, GenerationMixin):
    base_model_class = LonghornModel

    @staticmethod
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, past_key_values, position_ids=None, is_first_iteration=False, **kwargs
    ) -> dict:
        """Masks made ahead of compiled decoding; a generated token is never padding."""
        rows = resolve_packing(
            inputs_embeds.shape[:2],
            tokens_and_notes(past_key_values),
            attention_mask=attention_mask,
            position_ids=position_ids,
            continues_documents=not is_first_iteration,
            keeps_starts=True,
        )
        rows = replace(rows, real_so_far=None if attention_mask is None else attention_mask != 0)
        padding = CausalLMHead.create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values)
        return _attention_masks(config, inputs_embeds, rows, past_key_values) | padding


@auto_docstring
class LonghornForSequenceClassification(SequenceClassificationHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


@auto_docstring
class LonghornForMultipleChoice(MultipleChoiceHead, LonghornForSequenceClassification):
    """One score for each text."""


@auto_docstring
class LonghornForTokenClassification(TokenClassificationHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


@auto_docstring
class LonghornForQuestionAnswering(QuestionAnsweringHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


__all__ = [
    "LonghornForCausalLM",
    "LonghornForMultipleChoice",
    "LonghornForQuestionAnswering",
    "LonghornForSequenceClassification",
    "LonghornForTokenClassification",
    "LonghornModel",
    "LonghornPreTrainedModel",
]
