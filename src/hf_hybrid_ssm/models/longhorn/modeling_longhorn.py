# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""PyTorch Longhorn model (arXiv 2407.14207)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import auto_docstring

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin
from hf_hybrid_ssm.layers.rms_norm import RMSNorm
from hf_hybrid_ssm.models import classifiers
from hf_hybrid_ssm.models.base import HybridPreTrainedModel
from hf_hybrid_ssm.models.block import RecurrentMixin
from hf_hybrid_ssm.models.heads import CausalLMHead
from hf_hybrid_ssm.models.longhorn.attention_longhorn import (
    ATTENTION,
    AttendingGeneration,
    AttendingModel,
    LonghornAttention,
)
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.packing import PackedRows, States
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan


class ShortConvolution(nn.Conv1d):
    """silu(conv(x)) of tokens (B, L, D), each channel for itself; `rows` and `initial_state` as of `causal_conv`."""

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(self, x: torch.Tensor, rows: Rows = PLAIN_ROWS, initial_state: Any = None) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        weight = self.weight.squeeze(1)
        return causal_conv(x, weight, self.bias, activation="silu", rows=rows, initial_state=initial_state)


class LonghornMixer(RecurrentMixin, Float32ParametersMixin):
    """The Longhorn block: projections, short convolution, and the online-recall scan (section 3, algorithm 1).

    x, z = in_proj(u); x = silu(conv(x)); d, k, q = x_proj(x); out_proj(scan(x, dt_proj(d) + dt_bias, k, q) · silu(z)).
    """

    float32_parameters = ("D", "dt_bias")
    takes_pages = True

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
        at_least_float32 = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.dt_bias = nn.Parameter(torch.zeros(channels, dtype=at_least_float32))
        self.D = nn.Parameter(torch.ones(channels, dtype=at_least_float32))
        self.out_proj = nn.Linear(channels, config.hidden_size, bias=config.use_bias)

    def forward(self, u: torch.Tensor, rows: PackedRows | None = None, cache: Cache | None = None) -> torch.Tensor:
        """(B, L, M) → (B, L, M)."""
        return self.forward_with_cache(u, rows=rows, cache=cache)

    def forward_rows(self, u: torch.Tensor, *, past: States, rows: Rows) -> tuple[torch.Tensor, States]:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, conv = self.conv1d(x, rows, past.get("conv"))
        d, k, q = self.x_proj(x).split(self.projection_sizes, dim=-1)
        options = {"beta_bias": self.dt_bias, "D": self.D, "z": z, "rows": rows, "initial_state": past.get("scan")}
        y, scan = longhorn_scan(x, self.dt_proj(d), k, q, **options)
        return self.out_proj(y), {} if conv is None else {"conv": conv, "scan": scan}


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LonghornBlock(GradientCheckpointingLayer):
    """Pre-norm residual layer around a Longhorn mixer or attention, optionally followed by a SwiGLU."""

    def __init__(self, config: LonghornConfig, layer_idx: int):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.is_recurrent = config.layer_types[layer_idx] == "longhorn"
        if self.is_recurrent:
            self.mixer = LonghornMixer(config, layer_idx)
        else:
            self.self_attn = ATTENTION[config.layer_types[layer_idx]](config, layer_idx)
        self.mlp = None
        if config.mlp_intermediate_size is not None:
            self.mlp_norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.mlp = SwiGLU(config.hidden_size, config.mlp_intermediate_size)

    def forward(
        self, x: torch.Tensor, rows: PackedRows | None = None, cache: Cache | None = None, **attention: Any
    ) -> torch.Tensor:
        """(B, L, M) → (B, L, M); `attention` is for `LonghornAttention`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32)) if self.residual_in_fp32 else x
        if self.is_recurrent:
            x = x + self.mixer(self.norm(x), rows, cache)
        else:
            x = x + self.self_attn(self.norm(x), rows, cache=cache, **attention)[0]
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x))


def _uniform(module: Any, scale: float = 1.0) -> None:
    is_convolution = isinstance(module, nn.Conv1d)
    bound = scale / math.sqrt(module.kernel_size[0] if is_convolution else module.in_features)
    for parameter in (getattr(module, "weight", None), module.bias if is_convolution else None):
        if parameter is not None:  # as the codes of a quantizer's map, which were loaded
            init.uniform_(parameter, -bound, bound)


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
        scale = self.config.num_hidden_layers**-0.5 if self.config.rescale_prenorm_residual else 1.0
        if isinstance(module, LonghornMixer):
            init.zeros_(module.dt_bias)
            init.ones_(module.D)
            for projection in (module.in_proj, module.x_proj, module.dt_proj, module.conv1d):
                _uniform(projection)
            _uniform(module.out_proj, scale)
        elif isinstance(module, LonghornAttention | SwiGLU):
            *inner, last = (part for part in module.children() if not isinstance(part, nn.Dropout))
            for part in inner:
                _uniform(part)
            _uniform(last, scale)

    def _why_no_attentions(self) -> str | None:
        attending = set(self.config.layer_types) - {"longhorn"}
        if not attending:
            return "no token attends to another"
        return None if attending == {"full_attention"} else f"window {super()._why_no_attentions()}"


@auto_docstring
class LonghornModel(AttendingModel, LonghornPreTrainedModel):
    def __init__(self, config: LonghornConfig):
        super().__init__(config)
        # no padding_idx: text often ends with the token that also pads, and its embedding must be learnt
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LonghornBlock(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.add_positions(config)
        self.gradient_checkpointing = False
        self.post_init()


@auto_docstring
class LonghornForCausalLM(AttendingGeneration, CausalLMHead, LonghornPreTrainedModel, GenerationMixin):
    model: LonghornModel
    base_model_class = LonghornModel


@auto_docstring
class LonghornForSequenceClassification(classifiers.SequenceClassificationHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


@auto_docstring
class LonghornForMultipleChoice(classifiers.MultipleChoiceHead, LonghornForSequenceClassification):
    """One score for each text."""


@auto_docstring
class LonghornForTokenClassification(classifiers.TokenClassificationHead, LonghornPreTrainedModel):
    base_model_class = LonghornModel


@auto_docstring
class LonghornForQuestionAnswering(classifiers.QuestionAnsweringHead, LonghornPreTrainedModel):
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
