# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 4b4bdb7cc39caf6a37b14748a0895e3eb5726432db3fdac060e8c7c2a645b397

from typing import TYPE_CHECKING

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters


# ---- models/configuration.py ----------------------------------------------------------------------------------------
# What the configurations of all families share: presets, derived fields, and checks.

# Cache layers with states of fixed size; the second is window attention's, where a family must tell it from a
# recurrence. Here rather than beside the cache, since configurations do without torch.
STATE_LAYER_TYPE = "hybrid_ssm_state"
WINDOW_LAYER_TYPE = "hybrid_ssm_window"

GPT2_END_OF_TEXT = 50256


def gpt2_end_of_text(config: Any) -> int | None:
    """The token that begins and ends a text, where the vocabulary has it."""
    return GPT2_END_OF_TEXT if config.vocab_size > GPT2_END_OF_TEXT else None


class HybridConfigMixin:
    """Presets by name, derived fields, and checks with readable errors; placed before `PreTrainedConfig`.

    A derived field follows the fields it is computed from until someone sets it; setting it to its default (`None`)
    makes it follow again. It always holds its value, so `config.json` is complete.

    Arguments are documented by hand: transformers' `auto_docstring` fills in those of its own models, whose defaults
    and meanings (of windows, dropouts, state sizes) are not ours.
    """

    base_model_pp_plan: ClassVar[dict[str, tuple[list[str], list[str]]] | None] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    presets: ClassVar[dict[str, dict]] = {}
    # field → its value, given the configuration; a field comes after those it is computed from
    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    # what writes the code of a configuration next to it: set by the package, and None in an exported copy of this file
    code_exporter: ClassVar[Any] = None
    _following: frozenset[str]

    def __post_init__(self, **kwargs):
        fields = self.__dataclass_fields__  # type: ignore[attr-defined]
        self._following = frozenset(name for name in self.derived if getattr(self, name) == fields[name].default)
        if self.transformers_version is not None:  # type: ignore[attr-defined]
            # A saved configuration names every field; what equals the derived value was derived then, and is again.
            for name, value in self.derived.items():
                if getattr(self, name) == value(self):
                    self._following |= {name}
        self._derive()
        # The strict dataclass runs these again, but wraps what they raise; here a plain ValueError comes out.
        self.validate_layer_type()
        self.validate_architecture()
        num_labels = kwargs.get("num_labels")
        if isinstance(num_labels, int) and num_labels < 1:
            raise ValueError(f"num_labels={num_labels} must be positive.")
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        fields = self.__dataclass_fields__  # type: ignore[attr-defined]
        if "_following" not in self.__dict__ or name not in fields:  # the former while the fields are first filled
            return
        if name in self.derived:
            self._following -= {name}
            if value == fields[name].default:
                self._following |= {name}
        self._derive()

    def _derive(self) -> None:
        for name, value in self.derived.items():
            if self.follows(name):
                self.__dict__[name] = value(self)

    def follows(self, name: str) -> bool:
        """Whether the field has its derived value, because nobody has set it."""
        return name in self._following

    def to_dict(self) -> dict[str, Any]:
        """As in transformers: every field with its value."""
        output = super().to_dict()  # type: ignore[misc]
        output.pop("_following", None)
        return output

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """As in transformers; a configuration with an `auto_map` takes along the code that this names."""
        exporter = self.code_exporter if getattr(self, "auto_map", None) else None
        if exporter is None:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
            return
        self.auto_map = exporter.auto_map_of(self.model_type)
        super().save_pretrained(save_directory)
        exporter.write_code(save_directory, self.model_type)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def validate_layer_type(self) -> None:
        """Overridden by configurations with `block_types`."""

    def validate_architecture(self) -> None:
        """Overridden by every configuration: fields that must fit each other."""

    @classmethod
    def preset(cls, name: str, **overrides) -> PreTrainedConfig:
        """The configuration of a published size, e.g. `LonghornConfig.preset("125m", use_cache=False)`.

        Raises:
            ValueError: there is no preset of that name.
        """
        if name not in cls.presets:
            raise ValueError(f"{cls.__name__} has no preset {name!r}; it has {', '.join(map(repr, cls.presets))}.")
        return cls(**{**cls.presets[name], **overrides})  # type: ignore[return-value]

    def check_positive(self, *names: str) -> None:
        """Each named field must be > 0 and finite (None is allowed)."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be positive{' and finite' if value == math.inf else ''}.")

    def check_not_negative(self, *names: str) -> None:
        """Each named field must be ≥ 0 and finite."""
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be at least 0 and finite.")

    def check_multiple(self, name: str, of: str) -> None:
        """The first field must be a multiple of the second."""
        value, unit = getattr(self, name), getattr(self, of)
        if value % unit:
            raise ValueError(f"{name}={value} must be a multiple of {of}={unit}.")

    def check_relative_bias(self, *, two_sided: bool) -> None:
        """T5's buckets: half of them for single distances, and with `two_sided` half for each side."""
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance  # type: ignore[attr-defined]
        unit = 4 if two_sided else 2
        if buckets < unit or buckets % unit:
            reason = (
                "half for each side, and half of these for single distances" if two_sided else "half for each kind"
            )
            raise ValueError(f"relative_attention_num_buckets={buckets} must be a multiple of {unit}: {reason}.")
        if distance <= buckets // 2:
            raise ValueError(
                f"relative_attention_max_distance={distance} must exceed half of relative_attention_num_buckets="
                f"{buckets}, whose first half are single distances."
            )

    def check_rope(self) -> None:
        """Rotary positions turn pairs of channels of `head_dim`, by a known rule."""
        if self.head_dim % 2:  # type: ignore[attr-defined]
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs of channels.")  # type: ignore[attr-defined]
        rope = self.rope_parameters or {}  # type: ignore[attr-defined]
        kind, theta = rope.get("rope_type", rope.get("type", "default")), rope.get("rope_theta")
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if kind not in known:
            raise ValueError(f"rope_type={kind!r} is not one of {', '.join(map(repr, known))}.")
        if isinstance(theta, int | float) and not 0 < theta < math.inf:
            raise ValueError(f"rope_parameters={rope} must have a positive and finite rope_theta.")

    def check_grouped_heads(self) -> None:
        """Each key and value head serves equally many query heads."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads  # type: ignore[attr-defined]
        if heads % groups:
            raise ValueError(f"num_attention_heads={heads} must be a multiple of num_key_value_heads={groups}.")

    def check_dropout(self, *names: str) -> None:
        """Each named field is a probability below 1."""
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must lie in [0, 1).")

    def check_activation(self, *names: str) -> None:
        """Each named field is an activation of transformers."""
        from transformers.activations import ACT2FN  # imports torch, which a configuration else does without

        for name in names:
            value = getattr(self, name)
            if value not in ACT2FN:
                known = ", ".join(map(repr, sorted(ACT2FN)))
                raise ValueError(f"{name}={value!r} is not an activation of transformers, which are {known}.")

    def check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        """The named field must be one of `choices`."""
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")

    def check_block_types(self, choices: tuple[str, ...]) -> None:
        """`block_types` must name one of `choices` for each layer."""
        block_types = self.block_types  # type: ignore[attr-defined]
        layers = self.num_hidden_layers  # type: ignore[attr-defined]
        if len(block_types) != layers:
            raise ValueError(f"block_types names {len(block_types)} layers, but num_hidden_layers={layers}.")
        if unknown := sorted(set(block_types) - set(choices)):
            raise ValueError(f"block_types contains {unknown}; a layer is one of {', '.join(map(repr, choices))}.")


# ---- models/longhorn/configuration_longhorn.py ----------------------------------------------------------------------
# Longhorn model configuration.

# The cache layers of blocks with states of fixed size; full attention keeps transformers' own name and cache layer.
CACHE_LAYER_TYPES = {"linear_attention": STATE_LAYER_TYPE, "sliding_attention": WINDOW_LAYER_TYPE}
BLOCK_TYPES = ("linear_attention", "sliding_attention", "full_attention")


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
        use_scan_norm (`bool`, *optional*, defaults to `False`): RMSNorm between the scan and the output gate, which
            the official kernel offers and the published models leave off.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-5): Epsilon of the RMSNorms.
        residual_in_fp32 (`bool`, *optional*, defaults to `True`): Keep the residual stream in float32.
        rescale_prenorm_residual (`bool`, *optional*, defaults to `True`): Scale the initial output projections by
            `1 / sqrt(num_hidden_layers)`.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of the initial embeddings.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        block_types (`list[str]`, *optional*): One entry for each layer: `"linear_attention"` (Longhorn),
            `"sliding_attention"` or `"full_attention"`. All Longhorn by default. Also accepted under the name
            `layer_types`.
        sliding_window (`int`, *optional*, defaults to 2048): Tokens a sliding-attention layer sees, including the
            current one.
        num_attention_heads (`int`, *optional*): Heads of the attention layers; of size 64 by default where that
            divides `hidden_size`, else one.
        num_key_value_heads (`int`, *optional*): Key/value heads of the attention layers; as many as heads by default.
        head_dim (`int`, *optional*): Size of an attention head; `hidden_size // num_attention_heads` by default.
        rope_parameters (`RopeParameters`, *optional*): Rotary embedding of the attention layers.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of the attention weights.
        attention_bias (`bool`, *optional*, defaults to `False`): Bias in the projections of the attention layers.
        use_qk_norm (`bool`, *optional*, defaults to `False`): RMSNorm of each head's queries and keys before the
            rotation, as in Qwen3.
        mlp_intermediate_size (`int`, *optional*): Width of a SwiGLU after each mixer; none by default, as in
            the paper.
        max_position_embeddings (`int`, *optional*, defaults to 2048): Training length. Not a limit of Longhorn layers;
            read by evaluation tools as the default context.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; the last two GPT-2's end of text
            by default, if the vocabulary has it.

    ```python
    >>> from hf_hybrid_ssm import LonghornConfig, LonghornForCausalLM

    >>> model = LonghornForCausalLM(LonghornConfig.preset("125m"))
    ```"""

    model_type = "longhorn"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
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
        "block_types": lambda config: ["linear_attention"] * max(config.num_hidden_layers, 0),
        "time_step_rank": lambda config: math.ceil(config.hidden_size / 16),
        "num_attention_heads": lambda config: config.hidden_size // 64 if config.hidden_size % 64 == 0 else 1,
        "num_key_value_heads": lambda config: config.num_attention_heads,
        "head_dim": lambda config: config.hidden_size // max(config.num_attention_heads, 1),
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
    use_scan_norm: bool = False
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    rescale_prenorm_residual: bool = True
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    block_types: list[str] | None = None
    sliding_window: int | None = 2048
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = 0.0
    attention_bias: bool = False
    use_qk_norm: bool = False
    mlp_intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    pad_token_id: int | None = None
    bos_token_id: int | None = GPT2_END_OF_TEXT
    eos_token_id: int | list[int] | None = GPT2_END_OF_TEXT

    def __post_init__(self, **kwargs):
        self._take_layer_types(kwargs.pop("layer_types", None))
        super().__post_init__(**kwargs)

    def _take_layer_types(self, layer_types: list[str] | None) -> None:
        """`block_types` under the name transformers knows, or as the property `layer_types` gives them."""
        if layer_types is None:
            return
        own_names = {cache_name: block_type for block_type, cache_name in CACHE_LAYER_TYPES.items()}
        block_types = [own_names.get(layer_type, layer_type) for layer_type in layer_types]
        if self.block_types not in (None, block_types):
            raise ValueError(
                f"layer_types={layer_types} contradicts block_types={self.block_types}; give one of them."
            )
        if unknown := sorted(set(block_types) - set(BLOCK_TYPES)):
            raise ValueError(f"layer_types contains {unknown}; a layer is one of {', '.join(map(repr, BLOCK_TYPES))}.")
        if len(block_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(block_types)} layers, but num_hidden_layers={self.num_hidden_layers}."
            )
        self.block_types = block_types

    @property
    def has_attention(self) -> bool:
        """Whether some layer attends."""
        return any(block_type != "linear_attention" for block_type in self.block_types)

    @property
    def intermediate_size(self) -> int:
        """Channels D inside a Longhorn block."""
        return self.expand * self.hidden_size

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer each block needs (`block_types` in the words of the cache)."""
        # generation that exits early lowers the number of layers for a while
        return [CACHE_LAYER_TYPES.get(kind, kind) for kind in self.block_types[: self.num_hidden_layers]]

    def validate_layer_type(self):
        self.check_block_types(BLOCK_TYPES)

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

    def validate_rope(self):
        """As in transformers, where there is something to rotate."""
        if self.has_attention:
            super().validate_rope()

    def _check_attention(self) -> None:
        self.check_positive("sliding_window", "num_attention_heads", "num_key_value_heads", "head_dim")
        self.check_grouped_heads()
        self.check_rope()
        if "sliding_attention" in self.block_types and self.sliding_window is None:
            raise ValueError('sliding_window=None, but block_types has "sliding_attention" layers: give their window.')


# transformers copies the files that a file names; a configuration that is saved alone brings its models along
if TYPE_CHECKING:
    from .modeling_longhorn import LonghornForMultipleChoice  # noqa: F401
