"""Peers that transformers lacks, as model types to train beside the families; importing this registers them.

`mamba_native` is transformers' Mamba with a scan in C (`peers.c`) instead of a Python loop over time: the same
weights under the same names. `gated_delta_net` is its Qwen3-Next, whose states start with a memory. `llama_conv` is
its Llama with a short convolution before attention. `lstm_lm` is torch's LSTM between embeddings and the same
embeddings as a head.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.mamba.modeling_mamba import MambaMixer

from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.native_library import CFunction, library_beside

_library = library_beside(__file__)
_INPUTS = "u[B L D], delta[B L D], rates[N D], b[B L N], c[B L N]"
_FORWARD = CFunction(_library, "mamba_scan_forward", f"{_INPUTS}, y[B L D]", "B, L, D, N")
_BACKWARD = CFunction(
    _library,
    "mamba_scan_backward",
    f"{_INPUTS}, dy[B L D], du[B L D], ddelta[B L D], da[B N D], db[B L N], dc[B L N]",
    "B, L, D, N",
)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        u, delta, rates, b, c = (part.float().contiguous() for part in (u, delta, a.t(), b, c))
        y = torch.empty_like(u)
        _FORWARD((u, delta, rates, b, c, y))
        ctx.save_for_backward(u, delta, rates, b, c)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        u, _, rates, b, c = given = ctx.saved_tensors
        du, ddelta, db, dc = torch.empty_like(u), torch.empty_like(u), torch.zeros_like(b), torch.zeros_like(c)
        da = u.new_empty(len(u), *rates.shape)
        _BACKWARD((*given, gradients[0].float().contiguous(), du, ddelta, da, db, dc))
        return du, ddelta, da.sum(0).t(), db, dc


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y_t = C_t h_t with h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t, from h_0 = 0; float32.

    Args:
        u, delta: (B, L, D).
        a: (D, N).
        b, c: (B, L, N).
    """
    return _SelectiveScan.apply(u, delta, a, b, c)


class NativeMambaMixer(MambaMixer):
    """transformers' mixer; whole rows without a cache or a mask go through `selective_scan`.

    As transformers' own, it carries its state over the borders of packed documents.
    """

    def forward(self, hidden_states: Tensor, cache_params=None, attention_mask=None, **kwargs) -> Tensor:
        if cache_params is not None or attention_mask is not None or self.activation != "silu":
            return super().forward(hidden_states, cache_params, attention_mask, **kwargs)
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        x = short_convolution(x, self.conv1d, activation="silu")
        sizes = (self.time_step_rank, self.ssm_state_size, self.ssm_state_size)
        step, b, c = self.x_proj(x).split(sizes, dim=-1)
        y = selective_scan(x, F.softplus(self.dt_proj(step)), -torch.exp(self.A_log.float()), b, c)
        y = (y + x * self.D) * F.silu(gate)
        return self.out_proj(y.to(hidden_states.dtype))


class NativeMambaConfig(MambaConfig):
    """As transformers' `MambaConfig`. With `official_initialization` weights start as in Mamba's own code, and so as
    Longhorn's: embeddings N(0, 0.02), `in_proj`, `x_proj` and the convolution as torch's own, `out_proj` as torch's
    divided by the root of the number of layers. transformers draws embeddings, `in_proj` and `x_proj` from N(0, 0.1),
    divides nothing, and has zeros for the convolution's bias.
    """

    model_type = "mamba_native"

    official_initialization: bool = False

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        if self.official_initialization:
            self.initializer_range, self.rescale_prenorm_residual = 0.02, True


class NativeMambaForCausalLM(MambaForCausalLM):
    """As transformers' `MambaForCausalLM`, whose weights it loads."""

    config: NativeMambaConfig
    config_class = NativeMambaConfig

    def __init__(self, config: NativeMambaConfig):
        super().__init__(config)
        for layer in self.backbone.layers:
            layer.mixer.__class__ = NativeMambaMixer  # the same modules and initial weights, another forward
            if config.official_initialization:
                for module in (layer.mixer.in_proj, layer.mixer.x_proj, layer.mixer.conv1d):
                    module.reset_parameters()


def short_convolution(x: Tensor, conv: nn.Conv1d, activation: str | None) -> Tensor:
    """Each channel of x (B, L, D) convolved with its own filter of a depthwise `Conv1d`, causally."""
    return causal_conv(x, conv.weight.squeeze(1), conv.bias, activation=activation)[0]


class GatedDeltaNetConfig(Qwen3NextConfig):
    """As transformers' `Qwen3NextConfig`; the steps Δ of its gated delta nets start log-uniformly from
    `time_step_min` to `time_step_max`, as in their official code and as Mamba-2's.

    transformers starts all of them at 1.3, where the state keeps e^(-1.3 A) from one token to the next, with A uniform
    up to 16: most heads forget it within a token.
    """

    model_type = "gated_delta_net"

    time_step_min: float = 0.001
    time_step_max: float = 0.1


class GatedDeltaNetForCausalLM(Qwen3NextForCausalLM):
    """As transformers' `Qwen3NextForCausalLM`."""

    config: GatedDeltaNetConfig
    config_class = GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__(config)
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        for name, parameter in self.named_parameters():
            if name.endswith("dt_bias"):
                steps = torch.empty_like(parameter).uniform_(low, high).exp()
                parameter.data = steps + torch.log(-torch.expm1(-steps))  # softplus turns it into the step


def check_whole_rows(name: str, given: Mapping[str, Any]) -> None:
    """A model that keeps nothing between calls is asked for whole rows.

    Raises:
        ValueError: `use_cache=True`, a cache, hidden states, or a mask that hides tokens.
    """
    if given.get("use_cache") or any(given.get(cache) is not None for cache in ("cache", "past_key_values")):
        raise ValueError(f"{name} keeps no cache; use_cache must be False.")
    if given.get("output_hidden_states"):
        raise ValueError(f"{name} records no hidden states; output_hidden_states must be False.")
    if (mask := given.get("attention_mask")) is not None and not mask.all():
        raise ValueError(f"{name} takes whole rows; attention_mask must hide no token.")


class WholeRowsMixin:
    """A language model of transformers that keeps no cache of what was added to it. All arguments have names, since a
    Trainer hands on those that it finds.

    Raises:
        ValueError: as of `check_whole_rows`, in forward.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ):
        own: Any = self
        check_whole_rows(own.config.model_type, kwargs | {"use_cache": use_cache, "attention_mask": attention_mask})
        given = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels, "use_cache": False}
        return super().forward(**given, **kwargs)  # type: ignore[misc]


class ConvolvedLlamaConfig(LlamaConfig):
    """`LlamaConfig` with `conv_kernel`, the width of the convolution; 4 by default, as Longhorn's."""

    model_type = "llama_conv"

    conv_kernel: int = 4


class ConvolvedLlamaForCausalLM(WholeRowsMixin, LlamaForCausalLM):
    """Llama whose attention reads, in every layer, a short causal convolution of its normalised input, with SiLU: what
    Longhorn's recurrence reads. For whole rows: it has no cache for the convolution, which reaches over
    the borders of packed documents.

    Raises:
        ValueError: in forward, `use_cache=True`, or a mask that hides tokens.
    """

    config: ConvolvedLlamaConfig
    config_class = ConvolvedLlamaConfig

    def __init__(self, config: ConvolvedLlamaConfig):
        super().__init__(config)
        width, taps = config.hidden_size, config.conv_kernel
        for layer in self.model.layers:
            layer.self_attn.short_conv = nn.Conv1d(width, width, taps, groups=width)
            layer.self_attn.register_forward_pre_hook(_convolve_input, with_kwargs=True)
        config.use_cache = False


def _convolve_input(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    conv: Any = attention.short_conv
    return args, kwargs | {"hidden_states": short_convolution(kwargs["hidden_states"], conv, activation="silu")}


class LstmConfig(PreTrainedConfig):
    """Of `LstmForCausalLM`. Its embeddings start at 0.3: two layers without norms hardly hear those of 0.02, and
    after a million tokens know how often each one comes, no more.
    """

    model_type = "lstm_lm"

    vocab_size: int = 50257
    hidden_size: int = 128
    num_hidden_layers: int = 2
    initializer_range: float = 0.3
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None


class LstmForCausalLM(PreTrainedModel):
    """Embeddings, `num_hidden_layers` of torch's LSTM of their width with torch's initial weights, and the embeddings
    as a head. For training and scoring whole rows: it keeps no state between calls, and its state is carried over the
    borders of packed documents.

    Raises:
        ValueError: in forward, `use_cache=True`, or a mask that hides tokens.
    """

    config: LstmConfig
    config_class = LstmConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: LstmConfig):
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lstm = nn.LSTM(width, width, config.num_hidden_layers, batch_first=True)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        check_whole_rows("lstm_lm", {"use_cache": use_cache, "attention_mask": attention_mask})
        logits = self.lm_head(self.lstm(self.embed_tokens(input_ids))[0])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


def register(config: type[PreTrainedConfig], model: type[PreTrainedModel]) -> None:
    """With the Auto classes, and where a Trainer looks that smooths labels."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, model, exist_ok=True)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = model.__name__


register(NativeMambaConfig, NativeMambaForCausalLM)
register(GatedDeltaNetConfig, GatedDeltaNetForCausalLM)
register(ConvolvedLlamaConfig, ConvolvedLlamaForCausalLM)
register(LstmConfig, LstmForCausalLM)
