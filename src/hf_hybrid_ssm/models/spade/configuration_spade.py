# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""SPADE configuration of one stack, a language model or an encoder."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_hybrid_ssm.layers.mixers.types import SsmConfigMixin, default_state_size
from hf_hybrid_ssm.models.configuration import (
    DERIVED,
    STATE_AND_KEYS_LAYER_TYPE,
    STATE_LAYER_TYPE,
    Derived,
    HybridConfigMixin,
)

CACHE_LAYER_TYPES = {"window": STATE_LAYER_TYPE, "chunk": STATE_LAYER_TYPE, "full": STATE_AND_KEYS_LAYER_TYPE}
ATTENTION_TYPES = tuple(CACHE_LAYER_TYPES)

_LRA = {"num_attention_heads": 4, "hidden_act": "silu", "attention_dropout": 0.0, "ssm_trainable": "all"}
_LRA |= {"embedding_norm": False, "pooling": "mean", "classifier_activation": "gelu", "layer_norm_epsilon": 1e-5}
_LRA |= {"relative_bias_scope": "per_layer"}
_IMAGE = {"norm_type": "batchnorm", "norm_position": "pre", "pixel_input": True, "vocab_size": 256, "dropout": 0.0}
_BYTES = {"norm_type": "scalenorm", "norm_position": "post", "vocab_size": 256}
# tables 9 and 10 of the paper; sizes are those of MEGA, which it follows
_LRA_TASKS: dict[str, dict[str, Any]] = {
    "listops": {"vocab_size": 18, "num_labels": 10, "num_hidden_layers": 6, "hidden_size": 80, "dropout": 0.2}
    | {"norm_position": "post"},
    "text": _BYTES | {"num_labels": 2, "num_hidden_layers": 4, "hidden_size": 128, "dropout": 0.2},
    "retrieval": _BYTES
    | {"num_labels": 2, "num_hidden_layers": 6, "hidden_size": 128, "dropout": 0.1}
    | {"paired_input": True},
    "image": _IMAGE
    | {"num_labels": 10, "num_hidden_layers": 8, "hidden_size": 160, "pixel_mean": 0.48, "pixel_std": 0.24},
    "pathfinder": _IMAGE | {"num_labels": 2, "num_hidden_layers": 6, "hidden_size": 128},
    "pathx": _IMAGE
    | {"num_labels": 2, "num_hidden_layers": 4, "hidden_size": 64, "chunk_size": 1024, "ssm_dt_min": 1e-4},
}


def _lra_presets() -> dict[str, dict[str, Any]]:
    presets = {}
    for task, fields in _LRA_TASKS.items():
        size = fields.get("chunk_size", 128)
        sizes = {"intermediate_size": 2 * fields["hidden_size"], "classifier_hidden_size": 2 * fields["hidden_size"]}
        for kind in ("window", "chunk"):
            local = {"attention_type": kind, "sliding_window": size + 1, "chunk_size": size}
            presets[f"spade-lra-{task}-{kind}"] = _LRA | sizes | fields | local
    return presets


def stack_tp_plan(*stacks: str) -> dict[str, str]:
    """Heads need their biases unsharded: projections are gathered, their outputs split again. A model has one of the
    stacks, or two."""
    styles = {f"mixing.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
    styles |= {"mixing.self_attn.o_proj": "rowwise_split_input", "mixing.aggregate": "colwise_gather_output"}
    styles |= {"feed_forward.fc1": "colwise", "feed_forward.fc2": "rowwise"}
    return {f"{stack}.*.{name}": style for stack in stacks for name, style in styles.items()}


# one unit of FSDP2 a layer, wherever the layers are; a model uses the rules that match it
_FSDP_PLAN = {"embed_tokens": "free_full_weight"}
_FSDP_PLAN |= {f"{stack}.*": "free_full_weight" for stack in ("layers", "encoder.layers", "decoder.layers")}


@dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)
class SpadeStackConfig(SsmConfigMixin, HybridConfigMixin):
    """What every stack of SPADE has: the fields that [`SpadeConfig`] and [`SpadeSeq2SeqConfig`] share."""

    model_type = "spade"  # what is made of one stack takes an encoder-decoder's configuration too
    base_model_tp_plan: ClassVar[dict[str, str]] = stack_tp_plan("layers", "encoder.layers")
    base_model_fsdp_plan: ClassVar[dict[str, str]] = _FSDP_PLAN
    # what only a model of one stack has, as a field (`SpadeConfig`)
    adaptive_cutoffs: ClassVar[list[int] | None] = None
    causal_classifier: ClassVar[bool | None] = None
    paired_input: ClassVar[bool] = False
    pixel_input: ClassVar[bool] = False

    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "ssm_state_size": default_state_size,
        "ssm_trainable": lambda config: "none" if config.ssm_type in ("s4", "s4d") else "all",
        "final_norm": lambda config: config.norm_position == "pre",
        "embedding_norm": lambda config: config.norm_position == "post",
        "pooling": lambda config: "last" if config.causal_classifier else "first",
        "classifier_hidden_size": lambda config: config.hidden_size,
        "classifier_dropout": lambda config: config.dropout,
    }

    vocab_size: int = 32128
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    attention_type: str = "window"
    sliding_window: int = 512
    chunk_size: int = 512
    ssm_layers: list[int] | tuple[int, ...] = (0,)
    ssm_type: str = "s4"
    ssm_trainable: Derived[str] = DERIVED
    ssm_stop_gradient: bool = False
    ssm_merge: str = "concat"
    ssm_merge_weight: float = 0.5
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_bias_scope: str = "shared"
    norm_position: str = "pre"
    norm_type: str = "layernorm"
    final_norm: Derived[bool] = DERIVED
    embedding_norm: Derived[bool] = DERIVED
    layer_norm_epsilon: float = 1e-5
    hidden_act: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    embedding_dropout: float | int = 0.1
    scale_embedding: bool = False
    pooling: Derived[str] = DERIVED
    classifier_hidden_size: Derived[int] = DERIVED
    classifier_activation: str = "tanh"
    classifier_dropout: Derived[float | int] = DERIVED
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self, **kwargs):
        self.ssm_layers = list(self.ssm_layers)
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer each layer needs."""
        return [CACHE_LAYER_TYPES[self.attention_type]] * self.num_hidden_layers

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_attention_heads

    def validate_architecture(self):
        """Sizes that fit together, names that exist."""
        self.check_positive(
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "sliding_window", "chunk_size", "relative_attention_max_distance", "layer_norm_epsilon",
            "classifier_hidden_size",
        )  # fmt: skip
        self.check_not_negative("initializer_range", "ssm_merge_weight")
        self.check_dropout(
            "dropout", "attention_dropout", "activation_dropout", "embedding_dropout", "classifier_dropout"
        )
        self.check_activation("hidden_act", "classifier_activation")
        self.check_choice("attention_type", ATTENTION_TYPES)
        choices = self.check_ssm().trainable_choices
        if self.ssm_trainable not in choices:
            known = f"{', '.join(map(repr, choices))}, the choices of ssm_type={self.ssm_type!r}"
            raise ValueError(f"ssm_trainable={self.ssm_trainable!r} is not one of {known}.")
        self.check_choice("ssm_merge", ("concat", "add", "stack"))
        self.check_choice("relative_bias_scope", ("shared", "per_layer", "none"))
        self.check_choice("norm_position", ("pre", "post"))
        self.check_choice("norm_type", ("layernorm", "scalenorm", "batchnorm"))
        self.check_choice("pooling", ("first", "last", "mean"))
        self.check_multiple("hidden_size", "num_attention_heads")
        self.check_relative_bias(two_sided=True)  # an encoder may read the same configuration
        self._check_layers("ssm_layers", self.num_hidden_layers)

    def _check_layers(self, name: str, count: int) -> None:
        layers = list(getattr(self, name))
        if len(set(layers)) != len(layers) or any(layer < 0 or layer >= count for layer in layers):
            raise ValueError(f"{name}={layers} must be distinct layers from 0 to {count - 1}.")


@strict
class SpadeConfig(SpadeStackConfig, PreTrainedConfig):
    r"""
    Configuration of one SPADE stack (arXiv 2212.08136): a causal language model, or a bidirectional encoder with a
    classifier. The defaults are the paper's language model, with one embedding table for all tokens.

    Args:
        vocab_size (`int`, *optional*, defaults to 32128): Size of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 1024): Width d of the residual stream.
        intermediate_size (`int`, *optional*, defaults to 4096): Width of the feed-forward layers.
        num_hidden_layers (`int`, *optional*, defaults to 16): Number of layers.
        num_attention_heads (`int`, *optional*, defaults to 8): Attention heads, of size `hidden_size / heads`.
        attention_type (`str`, *optional*, defaults to `"window"`): `"window"`, `"chunk"` or `"full"`.
        sliding_window (`int`, *optional*, defaults to 512): Tokens that a token sees, including itself; an encoder's
            token sees `sliding_window - 1` others on each side.
        chunk_size (`int`, *optional*, defaults to 512): Tokens of a chunk, with `attention_type="chunk"`.
        ssm_layers (`list[int]`, *optional*, defaults to `[0]`): Layers with a state-space model, from 0 (bottom).
        ssm_type (`str`, *optional*, defaults to `"s4"`): `"s4"`, `"s4d"`, `"s5"`, `"hyena"`, `"unstructured"`,
            `"ema"`, `"lstm"`, or a name given to [`register_mixer`].
        ssm_state_size (`int`, *optional*): N; by default 64 (s4, s4d), 256 (s5, of all channels together), 16 (ema).
        ssm_num_dynamics (`int`, *optional*): Independent copies of A and B in s4 and s4d; one for each channel by
            default.
        ssm_dt_min, ssm_dt_max (`float`, *optional*, defaults to 1e-3 and 1e-1): Range of the initial step sizes.
        ssm_trainable (`str`, *optional*): `"none"` (frozen; default of s4 and s4d), `"output"` (of s4, s4d, s5 and
            ema: what reads the state out trains) or `"all"` (default of the others).
        ssm_stop_gradient (`bool`, *optional*, defaults to `False`): No gradient to the input of the state-space model,
            as the released encoder trains.
        ssm_merge (`str`, *optional*, defaults to `"concat"`): `"concat"` (of both normalised branches, then a linear
            map), `"add"` (weighted sum) or `"stack"` (attention on top of the state-space model).
        ssm_merge_weight (`float`, *optional*, defaults to 0.5): Share of the state-space model with `"add"`.
        filter_length (`int`, *optional*, defaults to 4096): Taps of a filter of hyena or unstructured.
        relative_attention_num_buckets, relative_attention_max_distance (`int`, *optional*, defaults to 32 and 128):
            T5's relative position bias.
        relative_bias_scope (`str`, *optional*, defaults to `"shared"`): One table for all layers, `"per_layer"`, or
            `"none"`.
        norm_position (`str`, *optional*, defaults to `"pre"`): `"pre"` or `"post"`.
        norm_type (`str`, *optional*, defaults to `"layernorm"`): `"layernorm"`, `"scalenorm"` or `"batchnorm"`.
        final_norm (`bool`, *optional*): A norm after the last layer; by default with `norm_position="pre"`.
        embedding_norm (`bool`, *optional*): A LayerNorm on the embeddings; by default with `norm_position="post"`.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-5): Epsilon of the norms.
        hidden_act (`str`, *optional*, defaults to `"relu"`): Activation of the feed-forward layers.
        dropout, attention_dropout, embedding_dropout (`float`, *optional*, defaults to 0.1): Dropout of branches,
            attention weights, and embeddings.
        activation_dropout (`float`, *optional*, defaults to 0.0): Dropout inside the feed-forward layers.
        scale_embedding (`bool`, *optional*, defaults to `False`): Multiply embeddings by `sqrt(hidden_size)`.
        adaptive_cutoffs (`list[int]`, *optional*): Adaptive input and softmax: ids that end each frequency band but
            the last; tokens are then sorted by frequency. The language model returns log-probabilities as logits.
        adaptive_factor (`int`, *optional*, defaults to 4): Each band's embeddings are narrower by this factor.
        adaptive_dropout (`float`, *optional*, defaults to 0.2): Dropout in the adaptive softmax.
        causal_classifier (`bool`, *optional*): Classifiers read the causal stack, as a language model trains it; by
            default where they are loaded from a language model's checkpoint, and else the bidirectional encoder.
        pooling (`str`, *optional*): What the classifier reads: the `"first"` real token (default), the `"last"`
            (default of a causal one), or the `"mean"` of all.
        classifier_hidden_size (`int`, *optional*): Width of its hidden layer; `hidden_size` by default.
        classifier_activation (`str`, *optional*, defaults to `"tanh"`): Activation of its hidden layer.
        classifier_dropout (`float`, *optional*): Its dropout; `dropout` by default.
        paired_input (`bool`, *optional*, defaults to `False`): The classifier compares two texts, encoded each for
            itself: `input_ids` and `attention_mask` are (batch, 2, length).
        pixel_input (`bool`, *optional*, defaults to `False`): `input_ids` are grey values 0 … 255, mapped linearly.
        pixel_mean, pixel_std (`float`, *optional*, defaults to 0.5): Their normalisation after division by 255.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of initial weights.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens.

    ```python
    >>> from hf_hybrid_ssm import SpadeConfig, SpadeForCausalLM

    >>> config = SpadeConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    >>> model = SpadeForCausalLM(config)
    ```
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "spade-lm-wt103": {
            "vocab_size": 267744,
            "adaptive_cutoffs": [20000, 60000],
            "scale_embedding": True,
            "final_norm": False,
            "dropout": 0.3,
            "embedding_dropout": 0.3,
            "activation_dropout": 0.1,
            "use_linear_cross_entropy": True,
            "bos_token_id": 0,  # as every fairseq dictionary begins
            "pad_token_id": 1,
            "eos_token_id": 2,
        },
        **_lra_presets(),
    }

    adaptive_cutoffs: list[int] | None = None  # type: ignore[misc]
    adaptive_factor: int = 4
    adaptive_dropout: float | int = 0.2
    causal_classifier: bool | None = None  # type: ignore[misc]
    paired_input: bool = False  # type: ignore[misc]
    pixel_input: bool = False  # type: ignore[misc]
    pixel_mean: float = 0.5
    pixel_std: float = 0.5

    def validate_architecture(self):
        """As of any stack; the vocabulary's bands, pixels and what a classifier reads."""
        self.check_positive("adaptive_factor", "pixel_std")
        self.check_dropout("adaptive_dropout")
        super().validate_architecture()
        if self.causal_classifier and self.pooling == "first":
            raise ValueError("pooling='first' with causal_classifier=True would read a token that has seen no other.")
        self._check_cutoffs()

    def _check_cutoffs(self) -> None:
        cutoffs = self.adaptive_cutoffs
        if cutoffs is None:
            return
        if sorted(set(cutoffs)) != list(cutoffs) or not cutoffs or cutoffs[0] < 1 or cutoffs[-1] >= self.vocab_size:
            raise ValueError(f"adaptive_cutoffs={cutoffs} must rise from at least 1 to below vocab_size.")
        if not self.tie_word_embeddings:
            raise ValueError("adaptive_cutoffs needs tie_word_embeddings=True: the softmax reads the embeddings.")
        if self.hidden_size % self.adaptive_factor ** len(cutoffs):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by adaptive_factor ** bands = "
                f"{self.adaptive_factor ** len(cutoffs)}."
            )


__all__ = ["SpadeConfig"]
