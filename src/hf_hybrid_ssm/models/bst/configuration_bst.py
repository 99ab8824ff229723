# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""Block-State Transformer configuration."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_hybrid_ssm.layers.mixers.types import MIXER_TYPES, SsmConfigMixin, default_state_size
from hf_hybrid_ssm.models.configuration import DERIVED, Derived, HybridConfigMixin

LAYER_TYPES = ("window_attention", "bst", "block_recurrent")
STATE_SIZES = {"s4d": 16, "s4": 16}  # the paper's


def _default_indices(config: Any) -> list[int]:
    return [index for index in (0, 6, 8) if index < config.num_hidden_layers]


def _layer_types(config: Any) -> list[str]:
    follows = config.follows("ssm_layers")
    indices = _default_indices(config) if follows else config.ssm_layers
    return ["bst" if index in indices else "window_attention" for index in range(config.num_hidden_layers)]


def _bst_layers(config: Any) -> list[int]:
    if config.follows("layer_types"):
        return _default_indices(config)
    return [index for index, kind in enumerate(config.layer_types) if kind == "bst"]


@strict
class BstConfig(SsmConfigMixin, HybridConfigMixin, PreTrainedConfig):
    r"""
    Configuration of a Block-State Transformer (arXiv 2306.09539). The defaults are BST:SH:S4 of about 200M parameters.

    A stack of window-attention layers ("window_attention") in which some ("bst") also attend to context states that a
    state-space model computes from the whole past. The paper's baselines are the same code: all `layer_types`
    "window_attention" is Slide, and a "block_recurrent" layer is a Block-Recurrent Transformer's with a fixed gate
    and no feed-forward layer on its states.

    Args:
        vocab_size (`int`, *optional*, defaults to 32128): Size of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 1024): Width d of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 12): Number of layers.
        num_attention_heads (`int`, *optional*, defaults to 8): Attention heads H.
        head_dim (`int`, *optional*, defaults to 128): Size e of a head; H e need not be d.
        intermediate_size (`int`, *optional*, defaults to 4096): Width of the feed-forward layers.
        hidden_act (`str`, *optional*, defaults to `"relu"`): Their activation.
        sliding_window (`int`, *optional*, defaults to 512): W: tokens a token attends to, and tokens of a block.
        layer_types (`list[str]`, *optional*): `"window_attention"`, `"bst"` or `"block_recurrent"` for each layer; by
            default from `ssm_layers`. A config.json has them as `block_types`.
        ssm_layers (`list[int]`, *optional*): Layers of type `"bst"`, from 0; `[0, 6, 8]` by default.
        context_variant (`str`, *optional*, defaults to `"sh"`): `"sh"` (one filter), `"mh"` (one per key and value
            head) or `"mf"` (one per context state).
        num_context_states (`int`, *optional*, defaults to 32): S, context states of a block for `"mf"`.
        recurrent_num_states (`int`, *optional*, defaults to 512): State vectors of a `"block_recurrent"` layer.
        ssm_type (`str`, *optional*, defaults to `"s4d"`): `"s4d"`, `"s4"`, `"unstructured"` or `"s5"`; with
            `context_variant="sh"` also `"hyena"`, `"ema"`, `"lstm"` or a name given to [`register_mixer`].
        ssm_state_size (`int`, *optional*): N, real state dimensions of a channel (s5: of all channels together); by
            default 16 (s4d, s4, ema) or 256 (s5).
        ssm_num_dynamics (`int`, *optional*): Independent copies of A and B; one for each filter and channel by
        default.
        ssm_init (`str`, *optional*, defaults to `"legs"`): `"legs"`, `"inv"` or `"lin"`, of s4d.
        ssm_discretization (`str`, *optional*): `"zoh"` (default) or `"bilinear"` for s4d; s4 is bilinear, s5 is zoh.
        ssm_dt_min, ssm_dt_max (`float`, *optional*, defaults to 1e-3 and 1e-1): Range of the initial step sizes.
        ssm_input_norm (`bool`, *optional*, defaults to `True`): Normalise the input of the state-space model.
        filter_length (`int`, *optional*, defaults to 4096): Taps of an unstructured filter; zero beyond.
        bidirectional (`bool`, *optional*, defaults to `False`): For classification and masked language models: the W
            tokens on each side and the token itself, a two-sided state-space model, and all context states of the
            block (`"sh"`, `"mh"`).
        retrieval_k (`int`, *optional*): Context states of finished blocks that each token retrieves, for each head,
            into the softmax over its block's own; none by default.
        retrieval_memory (`int`, *optional*, defaults to 1024): States of finished blocks that a layer remembers.
        retrieval_stride (`int`, *optional*, defaults to 1): It keeps every n-th of a block's states.
        qk_norm (`bool`, *optional*, defaults to `True`): L2-normalised queries and keys with a learned scale per head;
            otherwise the scale is `1 / sqrt(head_dim)`.
        attend_self (`bool`, *optional*, defaults to `False`): A token attends to itself too, besides the W before it.
        zero_kv_sink (`bool`, *optional*, defaults to `True`): Positions before the first token hold zero keys and
            values.
        relative_attention_num_buckets, relative_attention_max_distance (`int`, *optional*, defaults to 32 and 128):
            T5's relative bias.
        dropout, attention_dropout, final_dropout (`float`, *optional*, defaults to 0.05): Before attention and after
            the feed-forward layer, on attention weights, before the head.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-6): Epsilon of the norms.
        initializer_range (`float`, *optional*, defaults to 1.0): Standard deviation of the initial embeddings.
        logit_scale (`float`, *optional*): Factor on the logits; `hidden_size ** -0.5` by default.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; T5's by default.

    ```python
    >>> from hf_hybrid_ssm import BstConfig, BstForCausalLM

    >>> model = BstForCausalLM(BstConfig.preset("200m", context_variant="mf"))
    ```"""

    model_type = "bst"
    state_layer_types: ClassVar[tuple[str, ...]] = LAYER_TYPES
    # heads need their biases, scales and context states unsharded: projections are gathered, their outputs split
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.q_proj": "colwise_gather_output",
        "layers.*.attention.k_proj": "colwise_gather_output",
        "layers.*.attention.v_proj": "colwise_gather_output",
        "layers.*.attention.context_q_proj": "colwise_gather_output",
        "layers.*.attention.o_proj": "rowwise_split_input",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
    }
    presets: ClassVar[dict[str, dict]] = {
        "80m": {"hidden_size": 512},
        "200m": {},
        "200m-slide": {"ssm_layers": []},
        "200m-block-recurrent": {
            "layer_types": ["block_recurrent" if index == 9 else "window_attention" for index in range(12)]
        },
        "400m": {"num_attention_heads": 16, "intermediate_size": 8192, "ssm_layers": [0, 4, 6, 8]},
        "1.3b": {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 16384},
    }

    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "layer_types": _layer_types,
        "ssm_layers": _bst_layers,
        "ssm_state_size": lambda config: STATE_SIZES.get(config.ssm_type, default_state_size(config)),
        "logit_scale": lambda config: 1 / math.sqrt(config.hidden_size) if config.hidden_size > 0 else None,
    }

    vocab_size: int = 32128
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 4096
    hidden_act: str = "relu"
    sliding_window: int = 512
    layer_types: Derived[list[str]] = DERIVED
    ssm_layers: Derived[list[int]] = DERIVED
    context_variant: str = "sh"
    num_context_states: int = 32
    recurrent_num_states: int = 512
    ssm_init: str = "legs"
    ssm_discretization: str | None = None
    ssm_input_norm: bool = True
    bidirectional: bool = False
    retrieval_k: int | None = None
    retrieval_memory: int = 1024
    retrieval_stride: int = 1
    qk_norm: bool = True
    attend_self: bool = False
    zero_kv_sink: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout: float | int = 0.05
    attention_dropout: float | int = 0.05
    final_dropout: float | int = 0.05
    layer_norm_epsilon: float = 1e-6
    initializer_range: float | int = 1.0
    logit_scale: float | int | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    def validate_layer_type(self) -> None:
        indices, layers = self.ssm_layers, self.num_hidden_layers
        if len(set(indices)) != len(indices) or any(not 0 <= index < layers for index in indices):
            raise ValueError(
                f"ssm_layers={indices} must name different layers from 0 to {layers - 1} (num_hidden_layers={layers})."
            )
        actual = [index for index, kind in enumerate(self.layer_types) if kind == "bst"]
        if sorted(indices) != actual:
            raise ValueError(f"ssm_layers={indices} contradicts layer_types, whose bst layers are {actual}.")
        self.check_layer_types(LAYER_TYPES)

    def validate_architecture(self) -> None:
        """Sizes that fit together."""
        self.check_positive(
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "intermediate_size", "sliding_window", "num_context_states", "relative_attention_max_distance",
            "layer_norm_epsilon", "logit_scale", "recurrent_num_states",
        )  # fmt: skip
        self.check_not_negative("initializer_range")
        self.check_dropout("dropout", "attention_dropout", "final_dropout")
        self.check_activation("hidden_act")
        self.check_choice("context_variant", ("sh", "mh", "mf"))
        self.check_choice("ssm_init", ("legs", "inv", "lin"))
        mixer = self.check_ssm()
        if self.context_variant != "sh" and not mixer.supports_filters:
            several = [name for name, other in MIXER_TYPES.items() if other.supports_filters]
            raise ValueError(
                f"context_variant={self.context_variant!r} needs several filters per channel, and ssm_type="
                f"{self.ssm_type!r} has one: use context_variant='sh', or one of {', '.join(map(repr, several))}."
            )
        known = mixer.discretizations
        if self.ssm_discretization not in (None, *known):
            choices = " or ".join(map(repr, known)) or "none: it has no continuous system"
            raise ValueError(
                f"ssm_discretization={self.ssm_discretization!r} does not exist for ssm_type={self.ssm_type!r}, which "
                f"has {choices}."
            )
        if self.bidirectional and (self.context_variant == "mf" or "block_recurrent" in (self.layer_types or [])):
            raise ValueError(
                "bidirectional=True has no meaning for context_variant='mf' or 'block_recurrent' layers, whose states "
                f"come only from earlier blocks; got context_variant={self.context_variant!r} and "
                f"layer_types={self.layer_types}."
            )
        self._check_retrieval()
        self.check_relative_bias(two_sided=self.bidirectional)

    def _check_retrieval(self) -> None:
        if self.retrieval_k is None:
            if (self.retrieval_memory, self.retrieval_stride) != (1024, 1):
                raise ValueError(
                    f"retrieval_memory={self.retrieval_memory} and retrieval_stride={self.retrieval_stride} do "
                    "nothing without retrieval_k; set it, or leave them out."
                )
            return
        self.check_positive("retrieval_k", "retrieval_memory", "retrieval_stride")
        if self.retrieval_k > self.retrieval_memory:
            raise ValueError(
                f"retrieval_k={self.retrieval_k} cannot exceed the retrieval_memory={self.retrieval_memory} states."
            )
        slots = self.num_context_states if self.context_variant == "mf" else self.sliding_window
        if self.retrieval_stride > slots:
            raise ValueError(
                f"retrieval_stride={self.retrieval_stride} would keep none of a block's {slots} context states."
            )
        if self.bidirectional or "bst" not in (self.layer_types or []):
            raise ValueError(
                f"retrieval_k={self.retrieval_k} needs 'bst' layers that look back; got bidirectional="
                f"{self.bidirectional}, layer_types={self.layer_types}."
            )


__all__ = ["BstConfig"]
