# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""PyTorch Longhorn model (arXiv 2407.14207)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import auto_docstring

from hf_hybrid_ssm.layers.attention_sink import AttentionSink, Rotation
from hf_hybrid_ssm.layers.feed_forward import SwiGLU
from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models.base import HybridModelMixin, HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.cache import holds_states, tokens_and_packing_state
from hf_hybrid_ssm.models.cache_names import by_both_cache_names
from hf_hybrid_ssm.models.heads import (
    CausalLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_hybrid_ssm.models.longhorn.attention_longhorn import (
    WINDOW_STATES,
    LonghornAttention,
    LonghornMixedAttention,
    LonghornSlidingAttention,
    attention_masks,
    temperature,
)
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.packing import PackedRows, States, resolve_packing
from hf_hybrid_ssm.models.rotary import RotaryEmbedding, rotated, with_sink_rotation
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.pages import PagedState
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of width K followed by SiLU; parameters `weight` (D, 1, K) and `bias` (D,).

    Tokens are (B, L, D) here, unlike in `nn.Conv1d`.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, rows: Rows = PLAIN_ROWS, initial_state: torch.Tensor | PagedState | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | PagedState | None]:
        """`rows` and `initial_state` as of `hf_hybrid_ssm.ops.causal_conv`."""
        return causal_conv(
            x, self.weight.squeeze(1), self.bias, activation="silu", rows=rows, initial_state=initial_state
        )


class LonghornMixer(RecurrentMixin, Float32ParametersMixin):
    """The Longhorn block: projections, short convolution, and the online-recall scan (section 3, algorithm 1).

    x, z = in_proj(u); x = silu(conv(x)); d, k, q = x_proj(x); out_proj(scan(x, dt_proj(d), k, q) · silu(z)).

    With several heads k and q are (B, L, H, N), and each head has D / H consecutive channels. With `use_qk_proj` they
    are k_proj(u) and q_proj(u). With `use_rope_in_mixer` they are rotated by the tokens' positions; `rotation` are
    then cosines and sines, (B, L, N) each, else nothing.
    """

    float32_parameters = ("D", "dt_bias")
    takes_pages = True

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        channels, rank = config.intermediate_size, int(config.time_step_rank)
        self.num_heads, self.state_size = config.num_heads, config.state_size
        self.use_rope = config.use_rope_in_mixer
        size = self.num_heads * self.state_size
        self.projection_sizes = [rank] if config.use_qk_proj else [rank, size, size]
        self.in_proj = nn.Linear(config.hidden_size, 2 * channels, bias=config.use_bias)
        self.conv1d = ShortConvolution(channels, config.conv_kernel, bias=config.use_conv_bias)
        self.x_proj = nn.Linear(channels, sum(self.projection_sizes), bias=False)
        self.q_proj = self.k_proj = self.q_norm = self.k_norm = None
        if config.use_qk_proj:
            self.q_proj, self.k_proj = (nn.Linear(config.hidden_size, size, bias=config.use_bias) for _ in range(2))
        if config.use_qk_proj and config.use_qk_norm:
            eps = config.layer_norm_epsilon
            self.q_norm, self.k_norm = (RMSNorm(self.state_size, eps=eps) for _ in range(2))
        self.dt_proj = nn.Linear(rank, channels, bias=False)
        # The scan adds this bias in float32, so it is not part of `dt_proj`.
        at_least_float32 = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.dt_bias = nn.Parameter(torch.zeros(channels, dtype=at_least_float32))
        self.D = nn.Parameter(torch.ones(channels, dtype=at_least_float32))
        self.out_proj = nn.Linear(channels, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        rotation: tuple[torch.Tensor, ...] = (),
        past: States | None = None,
    ) -> Any:
        """(B, L, M) → (B, L, M).

        With `past` in place of a cache this is `forward_rows`, and also returns the states after the tokens: the way
        in for a block with window attention beside the mixer, and for a rollback. Both come through `forward`, so
        that accelerate and FSDP, which bring parameters in around it, find them.

        Args:
            rotation: as `self.rotation` returns, beside `past`.
        """
        if past is not None:
            assert rows is not None
            return self.forward_rows(hidden_states, *rotation, past=past, rows=rows)
        rotation = self.rotation(position_embeddings, hidden_states.shape[0])
        return self.forward_with_cache(hidden_states, *rotation, rows=rows, cache=cache)

    def states_after(self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        return self(inputs[0], rows, rotation=inputs[1:], past=past)[1]

    def rotation(
        self, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None, batch: int
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines (B or 1, L, N) → those that keys and queries are turned by, (B, L, N); none without RoPE.

        Raises:
            ValueError: the mixer rotates, and was given no positions.
        """
        if not self.use_rope:
            return ()
        if position_embeddings is None:
            raise ValueError("position_embeddings=None, but use_rope_in_mixer=True: give cosines and sines.")
        return tuple(part.expand(batch, -1, -1) for part in position_embeddings)

    def forward_rows(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        *rotation: torch.Tensor,
        past: States,
        rows: Rows,
    ) -> tuple[torch.Tensor, States]:
        raw, gate = self.in_proj(hidden_states).chunk(2, dim=-1)  # (B, L, D) each
        x, conv_state = self.conv1d(raw, rows, past.get("conv"))
        dt, k, q = self._projected(x, hidden_states, *rotation)
        y, scan_state = longhorn_scan(
            x,
            self.dt_proj(dt),
            k,
            q,
            beta_bias=self.dt_bias,
            D=self.D,
            z=gate,
            rows=rows,
            initial_state=past.get("scan"),
        )
        states = {} if conv_state is None else {"conv": conv_state, "scan": scan_state}
        return self.out_proj(y), states

    def _projected(
        self, x: torch.Tensor, hidden_states: torch.Tensor, *rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `dt_proj` takes (B, L, R), and keys and queries, (B, L, N) of one head or (B, L, H, N)."""
        dt, *keys_and_queries = self.x_proj(x).split(self.projection_sizes, dim=-1)
        if self.k_proj is not None and self.q_proj is not None:
            keys_and_queries = [self.k_proj(hidden_states), self.q_proj(hidden_states)]
        k, q = keys_and_queries
        if self.num_heads == 1 and self.k_norm is None and not rotation:
            return dt, k, q
        k, q = (part.unflatten(-1, (self.num_heads, self.state_size)) for part in (k, q))
        if self.k_norm is not None and self.q_norm is not None:
            k, q = self.k_norm(k), self.q_norm(q)
        if rotation:
            q, k = rotated(q, k, (rotation[0], rotation[1]), x.dtype)
        return (dt, k, q) if self.num_heads > 1 else (dt, k.squeeze(-2), q.squeeze(-2))


ATTENTION = {
    "sliding_attention": LonghornSlidingAttention,
    "hybrid_sliding": LonghornSlidingAttention,
    "mixed_attention": LonghornMixedAttention,
    "full_attention": LonghornAttention,
}


class LonghornBlock(GradientCheckpointingLayer):
    """Pre-norm residual layer around a Longhorn mixer or attention, optionally followed by a SwiGLU."""

    mixer: LonghornMixer
    self_attn: LonghornAttention

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        block_type = config.block_types[layer_idx]
        self.is_recurrent = block_type == "linear_attention"
        if block_type in ("linear_attention", "hybrid_sliding"):
            self.mixer = LonghornMixer(config, layer_idx)
        if block_type != "linear_attention":
            self.self_attn = ATTENTION[block_type](config, layer_idx)
        if config.mlp_intermediate_size is None:
            self.mlp = None
        else:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.mlp = SwiGLU(config.hidden_size, config.mlp_intermediate_size)

    @by_both_cache_names
    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> torch.Tensor:
        if self.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        inputs = (self.norm(hidden_states), rows, position_embeddings, attention_mask, cache)
        hidden_states = hidden_states + self._mixed(*inputs, **kwargs)
        if self.mlp is not None:
            hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states))
        return hidden_states

    def _mixed(
        self,
        normed: torch.Tensor,
        rows: PackedRows | None,
        position_embeddings: Any,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        **kwargs,
    ) -> torch.Tensor:
        """What the mixer, the attention or both make of the normed input (B, L, M)."""
        if self.is_recurrent:
            return self.mixer(normed, rows, cache, position_embeddings)
        return self.self_attn(normed, rows, position_embeddings, attention_mask, cache, **kwargs)[0]


class LonghornHybridBlock(RecurrentMixin, LonghornBlock):
    """A block with window attention and a Longhorn mixer side by side: both read the same normed input, and their
    outputs are added.

    One layer of the cache holds the states of both: keys and values of the window, convolution and scan of the mixer.
    The inputs of `forward_rows` are the normed hidden states (B, L, M), the mixer's rotation, and the window's heads.
    """

    self_attn: LonghornSlidingAttention

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        self.window_dropout = config.window_dropout

    def _mixed(
        self, normed, rows, position_embeddings, attention_mask, cache, sink_rotation=None, **kwargs
    ) -> torch.Tensor:
        heads = self.self_attn.heads(normed, position_embeddings)
        rotation = self.mixer.rotation(position_embeddings, normed.shape[0])
        inputs = (normed, *rotation, *heads)
        return self.forward_with_cache(*inputs, rows=rows, cache=cache, sink_rotation=sink_rotation)

    def forward_rows(  # type: ignore[override]
        self, *inputs: torch.Tensor, past: States, rows: Rows, sink_rotation: Rotation | None
    ) -> tuple[torch.Tensor, States]:
        of_mixer, heads = self._by_part(inputs)
        before_window, before_mixer = _states_by_part(past)
        attended, window = self.self_attn.forward_rows(
            *heads, past=before_window, rows=rows, sink_rotation=sink_rotation
        )
        if self.training and self.window_dropout > 0:
            is_open = torch.rand(attended.shape[0], 1, 1, device=attended.device) >= self.window_dropout
            attended = torch.where(is_open, attended, 0.0)
        mixed, states = self.mixer(of_mixer[0], rows, rotation=of_mixer[1:], past=before_mixer)
        return attended + mixed, window | states

    def states_after(self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        of_mixer, heads = self._by_part(inputs)
        before_window, before_mixer = _states_by_part(past)
        window = self.self_attn.states_after(*heads, past=before_window, rows=rows)
        return window | self.mixer.states_after(*of_mixer, past=before_mixer, rows=rows)

    def _by_part(self, inputs: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Inputs of the mixer, and heads of the window."""
        count = 3 if self.mixer.use_rope else 1
        return inputs[:count], inputs[count:]


def _states_by_part(states: States) -> tuple[States, States]:
    """Those of the window, and those of the mixer beside it."""
    of_window = {name: state for name, state in states.items() if name in WINDOW_STATES}
    return of_window, {name: state for name, state in states.items() if name not in of_window}


def _block(config: LonghornConfig, layer_idx: int) -> LonghornBlock:
    is_hybrid = config.block_types[layer_idx] == "hybrid_sliding"
    return (LonghornHybridBlock if is_hybrid else LonghornBlock)(config, layer_idx)


@auto_docstring
class LonghornPreTrainedModel(HybridPreTrainedModel):
    config: LonghornConfig
    _no_split_modules = ["LonghornBlock", "LonghornHybridBlock"]
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
            for projection in (module.in_proj, module.x_proj, module.dt_proj, module.q_proj, module.k_proj):
                if projection is not None:
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
        elif isinstance(module, AttentionSink):
            for parameter in module.parameters():
                init.zeros_(parameter)
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

    def init_parallel_plans(self) -> None:
        """A sink has a logit for every head, and groups are counted over all heads: where there are such, the heads of
        attention are gathered first."""
        super().init_parallel_plans()
        is_split = self.config.attention_sink is None and "mixed_attention" not in self.config.block_types
        if is_split or self._tp_plan is None:
            return
        whole = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
        of_attention = (rule for rule in self._tp_plan if ".self_attn." in rule)
        self._tp_plan |= {rule: whole.get(self._tp_plan[rule], self._tp_plan[rule]) for rule in of_attention}

    def _residual_scale(self) -> float:
        return 1 / math.sqrt(self.config.num_hidden_layers) if self.config.rescale_prenorm_residual else 1.0


def _uniform_fan_in(linear: nn.Linear, scale: float = 1.0) -> None:
    if getattr(linear, "weight", None) is None:
        return  # a quantizer's map, whose codes were loaded
    bound = scale / math.sqrt(linear.in_features)
    init.uniform_(linear.weight, -bound, bound)


@auto_docstring
class LonghornModel(HybridModelMixin, LonghornPreTrainedModel):
    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_block(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.uses_positions = config.has_positions
        self.rotary_emb = RotaryEmbedding(config) if config.has_positions else None
        self.gradient_checkpointing = False
        self.post_init()

    def _run_layers(
        self,
        hidden_states: torch.Tensor,
        rows: PackedRows,
        cache: Cache | None,
        *,
        position_ids: torch.Tensor | None = None,
        masks: dict[str, torch.Tensor | None] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        position_embeddings = mask = None
        if self.rotary_emb is not None:
            if position_ids is None:
                position_ids = rows.positions(hidden_states.device)
            distance = self.config.sliding_window if self.config.attention_sink == "constant" else None
            position_embeddings, sink_rotation = with_sink_rotation(
                self.rotary_emb, hidden_states, position_ids, distance
            )
            if sink_rotation is not None:
                kwargs["sink_rotation"] = sink_rotation
            if self.config.attn_scale:
                kwargs["query_scale"] = temperature(self.config, position_ids)
            if masks is None:
                masks = attention_masks(self.config, hidden_states, rows, cache)
            mask = masks.get("full_attention")
        inputs = (rows, position_embeddings, mask)
        return self._through_layers(hidden_states, *inputs, cache=cache, **kwargs)


@auto_docstring
class LonghornForCausalLM(CausalLMHead, LonghornPreTrainedModel, GenerationMixin):
    model: LonghornModel
    base_model_class = LonghornModel

    @staticmethod
    @by_both_cache_names
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, cache, position_ids=None, is_first_iteration=False, **kwargs
    ) -> dict:
        """Masks made ahead of compiled decoding; a generated token is padding only in rows that have ended."""
        rows = resolve_packing(
            inputs_embeds.shape[:2],
            tokens_and_packing_state(cache),
            attention_mask=attention_mask,
            position_ids=position_ids,
            continues_documents=not is_first_iteration,
            needs_starts=True,
            keeps_padding=True,
            has_states=holds_states(cache),
        )
        rows = replace(rows, full_token_mask=None if attention_mask is None else attention_mask != 0)
        padding = CausalLMHead.create_masks_for_generate(
            config, inputs_embeds, attention_mask, cache, is_first_iteration=is_first_iteration
        )
        return attention_masks(config, inputs_embeds, rows, cache) | padding


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
