# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 9d0f4c861e09915d489f30cf29f1b8d1dac6c64369e04756ecb2f807755f6f35

import copy
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_spade import SpadeConfig
from .layers import FeedForward, LocalSelfAttention, RelativeBias
from .mixers import mixer_from_config, mixer_state, named_states
from .model_parts import PackedRows, RecurrentMixin, States


# ---- models/spade/base_of_checkpoint.py -----------------------------------------------------------------------------
# Which stack a checkpoint holds, where one configuration has a causal model and an encoder.

ENCODER_HEADS = (
    "EncoderModel",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


class BaseOfCheckpoint(PreTrainedModel):
    """The class that `AutoModel` knows for a configuration, and that gives way to the encoder where the checkpoint is
    one of an encoder or of a head over it, as `config.architectures` says.

    `AutoModel` always hands over the configuration. Loaded by its own name without one, the class is itself.
    """

    encoder_architectures: ClassVar[tuple[str, ...]]  # the encoder first, which is in the module of the class

    @classmethod
    def _class_for(cls, config: PreTrainedConfig | None) -> type[PreTrainedModel]:
        architectures = set(getattr(config, "architectures", None) or ())
        if getattr(config, "causal_classifier", None) or architectures.isdisjoint(cls.encoder_architectures):
            return cls
        encoder = getattr(sys.modules[cls.__module__], cls.encoder_architectures[0])
        if cls._auto_class is not None:  # a folder's own code, which is saved with the model again
            encoder.register_for_auto_class(cls._auto_class)
        return encoder

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):
        chosen = cls._class_for(kwargs.get("config"))
        load = super().from_pretrained if chosen is cls else chosen.from_pretrained
        return load(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any):
        chosen = cls._class_for(config)
        build = super()._from_config if chosen is cls else chosen._from_config
        return build(config, **kwargs)


class StackOfCheckpoint(PreTrainedModel):
    """A classifier that reads the stack which its checkpoint holds: over the weights of a causal language model it is
    causal, unless `causal_classifier=False` asks for an encoder, which then starts anew.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any):
        config = kwargs.get("config")
        if config is None:
            given = {name: value for name, value in kwargs.items() if name != "state_dict"}
            found = cls.config_class.get_config_dict(pretrained_model_name_or_path, **given)[0]
            if found.get("causal_classifier") is None and _is_causal(found.get("architectures")):
                kwargs.setdefault("causal_classifier", True)
        elif getattr(config, "causal_classifier", False) is None and _is_causal(config.architectures):
            kwargs["config"] = copy.deepcopy(config)
            kwargs["config"].causal_classifier = True
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


def _is_causal(architectures: list[str] | None) -> bool:
    return not {"SpadeForCausalLM", "SpadeModel"}.isdisjoint(architectures or ())


# ---- models/spade/adaptive_vocabulary.py ----------------------------------------------------------------------------
# Adaptive input and softmax for very large vocabularies sorted by frequency (Baevski and Auli, 2018).
#
# `torch.nn.AdaptiveLogSoftmaxWithLoss` cannot share its weights with an input of bands, which here saves half of them.

class AdaptiveEmbedding(nn.Module):
    """Frequent tokens have wide embeddings, rare ones narrow ones; each band is projected to the model's width.

    Args:
        bands: ids that end each band, the last is the vocabulary's size.
        hidden_size: d; band b has embeddings of width d / factor^b.
        factor: see above.
    """

    def __init__(self, bands: list[int], hidden_size: int, factor: int = 4):
        super().__init__()
        self.bands = list(bands)
        self.hidden_size = hidden_size
        starts, widths = [0, *bands[:-1]], [hidden_size // factor**band for band in range(len(bands))]
        for band, (start, end, width) in enumerate(zip(starts, bands, widths)):
            self.register_parameter(f"table_{band}", nn.Parameter(torch.zeros(end - start, width)))
            self.register_parameter(f"projection_{band}", nn.Parameter(torch.zeros(hidden_size, width)))

    @property
    def tables(self) -> list[nn.Parameter]:
        """E_b, (tokens of band b, d / factor^b)."""
        return [self.get_parameter(f"table_{band}") for band in range(len(self.bands))]

    @property
    def projections(self) -> list[nn.Parameter]:
        """P_b, (d, d / factor^b)."""
        return [self.get_parameter(f"projection_{band}") for band in range(len(self.bands))]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L) ids → (B, L, d)."""
        out = self.projections[0].new_zeros(*input_ids.shape, self.hidden_size)
        start = 0
        for end, table, projection in zip(self.bands, self.tables, self.projections):
            inside = (input_ids >= start) & (input_ids < end)
            rows = F.embedding(torch.where(inside, input_ids - start, 0), table)
            out = torch.where(inside.unsqueeze(-1), rows @ projection.T, out)
            start = end
        return out


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of the whole vocabulary: log p(token) = log p(its band) + log p(token in the band).

    The first band's tokens and one entry for each other band share a softmax. All weights but those of these entries
    are the embedding's: a band's scores are E_b P_b^T h, those of the first band E_0 h.
    """

    def __init__(self, embedding: AdaptiveEmbedding, dropout: float = 0.0):
        super().__init__()
        self.embedding = [embedding]  # a list: its parameters are saved where they belong
        self.clusters = nn.Parameter(torch.zeros(len(embedding.bands) - 1, embedding.hidden_size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., d) → (..., V) log-probabilities."""
        (embedding,) = self.embedding
        h = self.dropout(hidden_states)
        head = self.first_band(h)
        first = embedding.bands[0]
        parts = [head[..., :first]]
        for band in range(1, len(embedding.bands)):
            parts.append(self._tail(h, band) + head[..., first + band - 1].unsqueeze(-1))
        return torch.cat(parts, -1)

    def loss(self, hidden_states: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
        """(T, d) and (T,) ids → (), the summed cross-entropy; a rare band is computed for its own tokens only."""
        (embedding,) = self.embedding
        first = embedding.bands[0]
        kept = targets != ignore_index
        h, targets = self.dropout(hidden_states[kept]), targets[kept]
        entry = targets  # in the first softmax: the token itself, or its band
        total = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        for band in range(1, len(embedding.bands)):
            start, end = embedding.bands[band - 1 : band + 1]
            inside = (targets >= start) & (targets < end)
            entry = torch.where(inside, first + band - 1, entry)
            scores = self._tail(h[inside], band).to(total.dtype)
            total = total + F.nll_loss(scores, targets[inside] - start, reduction="sum")
        return total + F.nll_loss(self.first_band(h).to(total.dtype), entry, reduction="sum")

    def first_band(self, h: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the first band's tokens, then of the other bands."""
        return F.linear(h, torch.cat([self.embedding[0].tables[0], self.clusters])).log_softmax(-1)

    def _tail(self, h: torch.Tensor, band: int) -> torch.Tensor:
        """Log-probabilities of a band's tokens, given the band."""
        inner = self.dropout(h @ self.embedding[0].projections[band])
        return F.linear(inner, self.embedding[0].tables[band]).log_softmax(-1)


# ---- models/spade/layers_spade.py -----------------------------------------------------------------------------------
# The layers of SPADE: local attention, the branch with the state-space model, and the blocks (section 3 of the
# paper).

class ScaleNorm(nn.Module):
    """One learned scalar times x / rms(x)."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.scale


class TimeBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, L, D) over batch and time; for inputs without padding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def build_norm(config: SpadeConfig) -> nn.Module:
    """The normalisation of (B, L, hidden_size) that `config.norm_type` names."""
    size, eps = config.hidden_size, config.layer_norm_epsilon
    if config.norm_type == "layernorm":
        return nn.LayerNorm(size, eps=eps)
    return ScaleNorm(eps) if config.norm_type == "scalenorm" else TimeBatchNorm(size, eps=eps)


def attention_window(config: SpadeConfig, is_causal: bool) -> dict[str, Any]:
    """The keys a token sees, as `local_attention` takes them."""
    if config.attention_type == "full":
        return {"window": (None, 0 if is_causal else None)}
    size = config.chunk_size if config.attention_type == "chunk" else config.sliding_window
    window = (size - 1, 0 if is_causal else size - 1)
    return {"window": window, "chunk_size": size if config.attention_type == "chunk" else None}


class SpadeAttention(LocalSelfAttention):
    """Scaled attention within a window, a chunk or everything, with T5's bias by distance."""

    def __init__(self, config: SpadeConfig, is_causal: bool, bias: bool = False):
        window = attention_window(config, is_causal)
        sizes = (config.hidden_size, config.num_attention_heads)
        super().__init__(*sizes, **window, bias=bias, dropout=config.attention_dropout)
        has_own_bias = config.relative_bias_scope == "per_layer"
        self.relative_bias = relative_bias(config, is_causal) if has_own_bias else None

    def forward(
        self, x: torch.Tensor, past: States, *, bias: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """As its base; `bias` (H, R) is that of all layers, where this one has none of its own."""
        if self.relative_bias is not None:
            bias = self.relative_bias(self.window[0])
        return super().forward(x, past, bias=bias, **options)


def relative_bias(config: SpadeConfig, is_causal: bool) -> RelativeBias:
    """T5's table for this stack."""
    buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
    return RelativeBias(config.num_attention_heads, buckets, distance, bidirectional=not is_causal)


class SpadeMixer(RecurrentMixin, nn.Module):
    """Local attention, in a global layer beside a state-space model: W [LN(ssm(x)) ; LN(attention(x))] + b."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = SpadeAttention(config, is_causal, attention_bias)
        self.merge, self.weight = config.ssm_merge, config.ssm_merge_weight
        self.stop_gradient = config.ssm_stop_gradient
        self.ssm = mixer_from_config(config, bidirectional=not is_causal) if layer_idx in config.ssm_layers else None
        if self.ssm is not None and self.merge != "stack":
            self.norm_global = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
            self.norm_local = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        if self.ssm is not None and self.merge == "concat":
            self.aggregate = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """(B, L, d) → (B, L, d); options as of `mix_with_cache`, and `bias`, the one by distance of all layers."""
        return self.mix_with_cache(x, **options)

    def mix(
        self, x: torch.Tensor, *, past: States, capacity: int | None, bias: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        attention_options = options | {"bias": bias, "capacity": capacity}
        if self.ssm is None:
            return self.self_attn(x, past, **attention_options)
        u = x.detach() if self.stop_gradient else x
        g, state = self.ssm(u, initial_state=mixer_state(past), **options)
        a, states = self.self_attn(g if self.merge == "stack" else x, past, **attention_options)
        return self._merged(g, a), states | named_states(state)

    def _merged(self, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """What the state-space model and the attention say together, each (B, L, d)."""
        if self.merge == "stack":
            return a
        g, a = self.norm_global(g), self.norm_local(a)
        if self.merge == "add":
            return self.weight * g + (1 - self.weight) * a
        return self.aggregate(torch.cat([g, a], dim=-1))

    def step(self, x: torch.Tensor, *, past: States, **options: Any) -> tuple[torch.Tensor, States]:  # type: ignore[override]
        if self.ssm is None:
            return self.self_attn(x, past, overwrite=True, **options)
        g, state = self.ssm.step_(x[:, 0], mixer_state(past))
        g = g.unsqueeze(1)
        a, states = self.self_attn(g if self.merge == "stack" else x, past, overwrite=True, **options)
        return self._merged(g, a), states | named_states(state)


class SpadeBlock(GradientCheckpointingLayer):
    """Mixing and feed-forward sublayers, with the norm before each (`pre`) or after each sum (`post`)."""

    def __init__(self, config: SpadeConfig, layer_idx: int, is_causal: bool, attention_bias: bool = False):
        super().__init__()
        self.is_pre = config.norm_position == "pre"
        self.mixing = SpadeMixer(config, layer_idx, is_causal, attention_bias)
        self.mixing_norm = build_norm(config)
        activation, dropout = ACT2FN[config.hidden_act], config.activation_dropout
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, activation, dropout=dropout)
        self.feed_forward_norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        bias: torch.Tensor | None = None,
        rows: PackedRows | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        mixing = {"bias": bias, "rows": rows, "past_key_values": past_key_values}
        hidden_states = self._residual(hidden_states, self.mixing, self.mixing_norm, **mixing)
        return self._residual(hidden_states, self.feed_forward, self.feed_forward_norm)

    def _residual(self, x: torch.Tensor, branch: nn.Module, norm: nn.Module, **options: Any) -> torch.Tensor:
        y = branch(norm(x) if self.is_pre else x, **options)
        x = x + (self.dropout(y) if self.training else y)
        return x if self.is_pre else norm(x)


class SpadeStack:
    """What lies between embeddings and heads; a mixin of the causal model, the encoder and the decoder."""

    def _build_stack(self, config: SpadeConfig, blocks: Iterable[nn.Module], is_causal: bool) -> None:
        eps = config.layer_norm_epsilon
        self.embedding_norm = nn.LayerNorm(config.hidden_size, eps) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.relative_bias = relative_bias(config, is_causal) if config.relative_bias_scope == "shared" else None
        self.layers = nn.ModuleList(blocks)
        self.norm = build_norm(config) if config.final_norm else None

    def _enter_stack(self, embeddings: torch.Tensor) -> torch.Tensor:
        """(B, L, d) embeddings → the first layer's input."""
        return self.dropout(embeddings if self.embedding_norm is None else self.embedding_norm(embeddings))

    def _shared_bias(self) -> torch.Tensor | None:
        return None if self.relative_bias is None else self.relative_bias(None)
