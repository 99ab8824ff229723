# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 33c259c12d95937baed7f82d9d88f1535cbbef442ced812b88e74146f84cf9a1

from typing import TYPE_CHECKING

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


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


# ---- models/lmu_isa/configuration_lmu_isa.py ------------------------------------------------------------------------
# LMU-ISA model configuration.

PRE_BLOCKS = ("ffn", "global_attention", "window_attention")
# float32 keeps the memory to 1e-5 over 16,384 steps up to these sizes; beyond, nothing was measured
LARGEST_ORDER, LARGEST_THETA = 1024, 4096.0

# name: layers, d, q, q', h1, h2, heads, h2 with global attention (table 3 of the paper; the last four are our own)
_SIZES = {
    "55k": (3, 48, 50, 5, 72, 105, 4, 80),
    "100k": (3, 65, 65, 7, 98, 142, 5, 109),
    "200k": (3, 91, 90, 9, 137, 210, 7, 164),
    "300k": (3, 112, 110, 13, 168, 253, 8, 196),
    "500k": (3, 144, 150, 15, 216, 333, 8, 260),
    "1m": (3, 204, 220, 22, 306, 469, 12, 366),
    "10m-rule": (3, 645, 250, 25, 968, 1595, 15, 1273),
    "10m-deep": (8, 384, 250, 25, 576, 1021, 6, 828),
    "100m-rule": (3, 2048, 250, 25, 3072, 5055, 16, 4031),
    "100m-deep": (12, 1024, 256, 24, 1536, 2518, 16, 2005),
}


def _presets() -> dict[str, dict[str, Any]]:
    presets = {}
    for name, (layers, width, order, reduced, pre, post, heads, post_global) in _SIZES.items():
        fields: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "lmu_order": order,
            "lmu_reduced_order": reduced,
        }
        fields |= {"pre_intermediate_size": pre, "num_attention_heads": heads}
        if width >= 512:
            fields["attention_scale"] = width**-0.5  # unscaled logits saturate at such widths
        presets[name] = {**fields, "post_intermediate_size": post}
        presets[f"{name}-global"] = {
            **fields, "post_intermediate_size": post_global, "first_sublayer": "global_attention",
        }  # fmt: skip
    return presets


@strict
class LmuIsaConfig(HybridConfigMixin, PreTrainedConfig):
    r"""
    Configuration of an LMU-ISA model (arXiv 2110.02402). The defaults are the paper's model of a million parameters.

    Args:
        vocab_size (`int`, *optional*, defaults to 50257): Size of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 204): Width d of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 3): Number of blocks.
        lmu_order (`int`, *optional*, defaults to 220): q, polynomials that hold each channel's past.
        lmu_reduced_order (`int`, *optional*): q', rows of queries, keys and values; `lmu_order / 10` by default.
        lmu_theta (`float`, *optional*, defaults to 350.0): Window of the memory, in tokens.
        first_sublayer (`str`, *optional*, defaults to `"ffn"`): What comes before the memory: `"ffn"`,
            `"global_attention"`, or `"window_attention"`.
        pre_intermediate_size (`int`, *optional*): Width of the first feed-forward layer; `1.5 * hidden_size` by
            default.
        post_intermediate_size (`int`, *optional*, defaults to 469): Width of the one after the memory.
        num_attention_heads (`int`, *optional*, defaults to 12): Heads of the attention before the memory.
        sliding_window (`int`, *optional*, defaults to 256): Tokens that `"window_attention"` sees, including the
            current one.
        hidden_act (`str`, *optional*, defaults to `"gelu"`): Activation of feed-forward layers and of queries, keys
            and values.
        use_bias (`bool`, *optional*, defaults to `True`): Biases everywhere.
        attention_scale (`float`, *optional*, defaults to 1.0): Scale of the logits of the implicit attention; the
            paper does not scale them, `hidden_size ** -0.5` suits wide models.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-5): Epsilon of the LayerNorms.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of initial weights, except for
            the reductions (`lmu_order ** -0.5`) and the collapse (`lmu_reduced_order ** -0.5`).
        hidden_dropout (`float`, *optional*, defaults to 0.0): Dropout of each branch.
        attention_dropout (`float`, *optional*, defaults to 0.0): Dropout of the attention weights before the memory.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; the last two GPT-2's end of text
            by default, if the vocabulary has it.

    ```python
    >>> from hf_hybrid_ssm import LmuIsaConfig, LmuIsaForCausalLM

    >>> config = LmuIsaConfig.preset("55k", vocab_size=100)
    >>> model = LmuIsaForCausalLM(config)
    ```
    """

    model_type = "lmu_isa"
    keys_to_ignore_at_inference = ["past_key_values"]
    # the memory and its implicit attention are replicated on every device
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.q_proj": "colwise_gather_output",
        "layers.*.attention.k_proj": "colwise_gather_output",
        "layers.*.attention.v_proj": "colwise_gather_output",
        "layers.*.attention.o_proj": "rowwise_split_input",
        "layers.*.pre_feed_forward.fc1": "colwise",
        "layers.*.pre_feed_forward.fc2": "rowwise",
        "layers.*.post_feed_forward.fc1": "colwise",
        "layers.*.post_feed_forward.fc2": "rowwise",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = _presets()

    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "lmu_reduced_order": lambda config: max(1, round(config.lmu_order / 10)),
        "pre_intermediate_size": lambda config: math.floor(1.5 * config.hidden_size + 0.5),
        "bos_token_id": gpt2_end_of_text,
        "eos_token_id": gpt2_end_of_text,
    }

    vocab_size: int = 50257
    hidden_size: int = 204
    num_hidden_layers: int = 3
    lmu_order: int = 220
    lmu_reduced_order: int | None = None
    lmu_theta: float | int = 350.0
    first_sublayer: str = "ffn"
    pre_intermediate_size: int | None = None
    post_intermediate_size: int = 469
    num_attention_heads: int = 12
    sliding_window: int | None = 256
    hidden_act: str = "gelu"
    use_bias: bool = True
    attention_scale: float | int = 1.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = GPT2_END_OF_TEXT
    eos_token_id: int | list[int] | None = GPT2_END_OF_TEXT

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer each block needs."""
        return [STATE_LAYER_TYPE] * self.num_hidden_layers

    def validate_architecture(self):
        """Sizes that fit together; a warning where the precision of the memory was not measured."""
        self.check_positive(
            "vocab_size", "hidden_size", "num_hidden_layers", "lmu_order", "lmu_reduced_order", "lmu_theta",
            "pre_intermediate_size", "post_intermediate_size", "layer_norm_epsilon", "attention_scale",
        )  # fmt: skip
        self.check_not_negative("initializer_range")
        self.check_dropout("hidden_dropout", "attention_dropout")
        self.check_activation("hidden_act")
        self.check_choice("first_sublayer", PRE_BLOCKS)
        if self.lmu_reduced_order > self.lmu_order:
            raise ValueError(
                f"lmu_reduced_order={self.lmu_reduced_order} must be at most lmu_order={self.lmu_order}: it reduces."
            )
        if self.first_sublayer != "ffn":
            self.check_positive("num_attention_heads", "sliding_window")
            self.check_multiple("hidden_size", "num_attention_heads")
        if self.first_sublayer == "window_attention" and self.sliding_window is None:
            raise ValueError('sliding_window=None, but first_sublayer is "window_attention": give its window.')
        if self.lmu_order > LARGEST_ORDER or self.lmu_theta > LARGEST_THETA:
            warnings.warn(
                f"lmu_order={self.lmu_order}, lmu_theta={self.lmu_theta}: float32 memories were measured up to "
                f"order {LARGEST_ORDER} and theta {LARGEST_THETA:.0f} (relative error 8e-6 after 16,384 tokens).",
                stacklevel=2,
            )
        if self.lmu_order > self.lmu_theta:
            warnings.warn(
                f"lmu_order={self.lmu_order} exceeds lmu_theta={self.lmu_theta}: the memory has more coefficients "
                "than tokens in its window, and the last ones hold nothing.",
                stacklevel=2,
            )


# transformers copies the files that a file names; a configuration that is saved alone brings its models along
if TYPE_CHECKING:
    from .modeling_lmu_isa import LmuIsaForMultipleChoice  # noqa: F401
