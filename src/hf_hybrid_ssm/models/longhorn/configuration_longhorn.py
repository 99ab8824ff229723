# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""Longhorn model configuration."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from hf_hybrid_ssm.models.configuration import (
    DERIVED,
    GPT2_END_OF_TEXT,
    Derived,
    HybridConfigMixin,
    gpt2_end_of_text,
)

LAYER_TYPES = ("longhorn", "window_attention", "full_attention")
ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rotary positions whose frequencies follow from the longest text of a batch. A cached key keeps those that it was
turned by: a text that grows past their bound would be read by two rules, and a short row by a long one's."""


def _rope_type(rope_parameters: dict | None) -> str:
    rope = rope_parameters or {}
    return rope.get("rope_type", rope.get("type", "default"))


class AbsentWhenNone:
    """A field that is no attribute while it is None: other programs take what is there for a number, as
    sentence-transformers takes the lesser of `max_position_embeddings` and the tokenizer's length."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: Any, owner: type) -> Any:
        if config is None:
            return None  # of the class, where dataclasses look for the default
        if self.name not in vars(config):
            raise AttributeError(f"{owner.__name__} has no {self.name}: nothing limits it.")
        return vars(config)[self.name]

    def __set__(self, config: Any, value: Any) -> None:
        vars(config).pop(self.name, None)
        if value is not None:
            vars(config)[self.name] = value


@strict
class LonghornConfig(HybridConfigMixin, PreTrainedConfig):
    r"""
    Configuration of a Longhorn model (arXiv 2407.14207). The defaults are those of the 125M model of the paper.

    Args:
        vocab_size (`int`, *optional*, defaults to 50304): Size of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 768): Width M of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 24): Number of layers, twice a transformer's of equal depth.
        state_size (`int`, *optional*, defaults to 16): Size N of keys, queries and of each channel's predictor.
        expand (`int`, *optional*, defaults to 2): Channels inside the block, as a multiple of `hidden_size`.
        conv_kernel (`int`, *optional*, defaults to 4): Width K of the short causal convolution.
        time_step_rank (`int` or `str`, *optional*, defaults to `"auto"`): Rank of the projection to the step size
            (the logit of beta); `"auto"` is `ceil(hidden_size / 16)`.
        use_bias (`bool`, *optional*, defaults to `False`): Bias in the input and output projections.
        use_conv_bias (`bool`, *optional*, defaults to `True`): Bias in the short convolution.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-5): Epsilon of the RMSNorms.
        residual_in_fp32 (`bool`, *optional*, defaults to `True`): Keep the residual stream in float32.
        rescale_prenorm_residual (`bool`, *optional*, defaults to `True`): Scale the initial output projections by
            `1 / sqrt(num_hidden_layers)`.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of the initial embeddings.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        layer_types (`list[str]`, *optional*): One entry for each layer: `"longhorn"`, `"window_attention"` or
            `"full_attention"`. All Longhorn by default. A config.json has them as `block_types`.
        sliding_window (`int`, *optional*, defaults to 2048): Tokens that window attention sees, including the
            current one.
        num_attention_heads (`int`, *optional*): Heads of the attention layers; of size 64 by default where that
            divides `hidden_size`, else one.
        num_key_value_heads (`int`, *optional*): Key/value heads of the attention layers; as many as heads by default.
        head_dim (`int`, *optional*): Size of an attention head; `hidden_size // num_attention_heads` by default.
        rope_parameters (`RopeParameters`, *optional*): Rotary embedding of the attention layers; no
            `rope_type` that follows from the length of a text (`"dynamic"`, `"longrope"`).
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of the attention weights.
        mlp_intermediate_size (`int`, *optional*): Width of a SwiGLU after each mixer; none by default, as in
            the paper.
        max_position_embeddings (`int`, *optional*): Training length of layers whose rotary positions have no bound
            (full attention) or are scaled, 2048 by default. Nothing limits the others, which have no such attribute.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; the last two GPT-2's end of text
            by default, if the vocabulary has it.

    ```python
    >>> from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM

    >>> model = LonghornForCausalLM(LonghornConfig.preset("125m"))
    ```"""

    model_type = "longhorn"
    state_layer_types: ClassVar[tuple[str, ...]] = ("longhorn", "window_attention")
    # the scan is replicated on every device: its inputs are gathered, its output is split again
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.mixer.in_proj": "colwise_gather_output",
        "layers.*.mixer.x_proj": "rowwise_split_input",
        "layers.*.mixer.dt_proj": "colwise_gather_output",
        "layers.*.mixer.out_proj": "rowwise_split_input",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    presets: ClassVar[dict[str, dict]] = {
        "125m": {"hidden_size": 768, "num_hidden_layers": 24},
        "350m": {"hidden_size": 1024, "num_hidden_layers": 48},
        "1.3b": {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "vocab_size": 32000,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }

    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "layer_types": lambda config: ["longhorn"] * max(config.num_hidden_layers, 0),
        "time_step_rank": lambda config: math.ceil(config.hidden_size / 16),
        "num_attention_heads": lambda config: config.hidden_size // 64 if config.hidden_size % 64 == 0 else 1,
        "num_key_value_heads": lambda config: config.num_attention_heads,
        "head_dim": lambda config: config.hidden_size // max(config.num_attention_heads, 1),
        "max_position_embeddings": lambda config: 2048 if config.limits_positions else None,
        "bos_token_id": gpt2_end_of_text,
        "eos_token_id": gpt2_end_of_text,
    }

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 24
    state_size: int = 16
    expand: int = 2
    conv_kernel: int = 4
    time_step_rank: int | str = "auto"
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    rescale_prenorm_residual: bool = True
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    layer_types: Derived[list[str]] = DERIVED
    sliding_window: int | None = 2048
    num_attention_heads: Derived[int] = DERIVED
    num_key_value_heads: Derived[int] = DERIVED
    head_dim: Derived[int] = DERIVED
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = 0.0
    mlp_intermediate_size: int | None = None
    max_position_embeddings: int | None = AbsentWhenNone()  # type: ignore[assignment]
    pad_token_id: int | None = None
    bos_token_id: int | None = GPT2_END_OF_TEXT
    eos_token_id: int | list[int] | None = GPT2_END_OF_TEXT

    def __eq__(self, other: object) -> bool:
        """As of dataclasses; a field that is absent is one that is None."""
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, name, None) == getattr(other, name, None) for name in self.__dataclass_fields__)

    @property
    def has_attention(self) -> bool:
        """Whether some layer attends."""
        return any(kind != "longhorn" for kind in self.layer_types)

    @property
    def limits_positions(self) -> bool:
        """Whether some layer rotates by distances without bound, or by frequencies scaled to a length."""
        return "full_attention" in self.layer_types or _rope_type(self.rope_parameters) not in ("default", "linear")

    @property
    def intermediate_size(self) -> int:
        """Channels D inside a Longhorn block, `expand * hidden_size`; a SwiGLU has `mlp_intermediate_size`."""
        return self.expand * self.hidden_size

    def validate_layer_type(self):
        self.check_layer_types(LAYER_TYPES)

    def validate_architecture(self):
        """Sizes that fit together."""
        self.check_positive(
            "vocab_size", "hidden_size", "num_hidden_layers", "state_size", "expand", "conv_kernel",
            "mlp_intermediate_size", "layer_norm_epsilon", "max_position_embeddings",
        )  # fmt: skip
        self.check_not_negative("initializer_range")
        self.check_dropout("attention_dropout")
        if not isinstance(self.time_step_rank, int) or self.time_step_rank <= 0:
            raise ValueError(f'time_step_rank={self.time_step_rank!r} must be "auto" or a positive integer.')
        if self.has_attention:
            self._check_attention()
            self._check_rope()

    def validate_rope(self):
        """As in transformers, where there is something to rotate."""
        if self.has_attention:
            super().validate_rope()

    def _check_attention(self) -> None:
        self.check_positive("sliding_window", "num_attention_heads", "num_key_value_heads", "head_dim")
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}.")
        size, rest = divmod(self.hidden_size, self.num_attention_heads)
        if rest and self.head_dim == size:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of num_attention_heads="
                f"{self.num_attention_heads}: heads of {size} channels would leave out {rest}. Choose another number, "
                "or another head_dim."
            )
        if self.sliding_window is None and "window_attention" in self.layer_types:
            raise ValueError('sliding_window=None, but layer_types has "window_attention" layers: give their window.')

    def _check_rope(self) -> None:
        """Rotary positions turn pairs of channels of `head_dim`, by a known rule."""
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of channels.")
        rope = self.rope_parameters or {}
        kind, theta = _rope_type(rope), rope.get("rope_theta")
        known = ("default", *(name for name in ROPE_INIT_FUNCTIONS if name not in ROPE_BY_LENGTH))
        if kind in ROPE_BY_LENGTH:
            raise ValueError(
                f"rope_type={kind!r} chooses its frequencies by the length of the text, and keys in a cache keep "
                f"those that they were turned by: use one of {', '.join(map(repr, known))}."
            )
        if kind not in known:
            raise ValueError(f"rope_type={kind!r} is not one of {', '.join(map(repr, known))}.")
        if kind != "proportional" and rope.get("partial_rotary_factor", 1.0) != 1:
            raise ValueError(
                f"partial_rotary_factor={rope['partial_rotary_factor']} turns some channels of a head, and all of "
                "them are turned here: leave it out."
            )
        if isinstance(theta, int | float) and not 0 < theta < math.inf:
            raise ValueError(f"rope_parameters={rope} must have a positive and finite rope_theta.")


__all__ = ["LonghornConfig"]
