# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: ceb0e65a2e6172168ec21d156dda4d17359c3393b7e0c05e94f6da8d623fdaee

from typing import TYPE_CHECKING

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .mixers import MIXERS, check_mixer_fields


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


# ---- models/bst/configuration_bst.py --------------------------------------------------------------------------------
# Block-State Transformer configuration.

BLOCK_TYPES = ("sliding_attention", "bst", "block_recurrent")
STATE_SIZES = {"s4d": 16, "s4": 16}  # the paper's


def _default_indices(config: Any) -> list[int]:
    return [index for index in (0, 6, 8) if index < config.num_hidden_layers]


def _block_types(config: Any) -> list[str]:
    follows = config.follows("ssm_layers")
    indices = _default_indices(config) if follows else config.ssm_layers
    return ["bst" if index in indices else "sliding_attention" for index in range(config.num_hidden_layers)]


def _bst_layers(config: Any) -> list[int]:
    if config.follows("block_types"):
        return _default_indices(config)
    return [index for index, block_type in enumerate(config.block_types) if block_type == "bst"]


def _state_size(config: Any) -> int | None:
    default = getattr(MIXERS.get(config.ssm_type), "default_state_size", None)
    return STATE_SIZES.get(config.ssm_type, default)


@strict
class BstConfig(HybridConfigMixin, PreTrainedConfig):
    r"""
    Configuration of a Block-State Transformer (arXiv 2306.09539). The defaults are BST:SH:S4 of about 200M parameters.

    A stack of window-attention layers ("sliding_attention") in which some ("bst") also attend to context states that a
    state-space model computes from the whole past. The paper's baselines are the same code: all `block_types`
    "sliding_attention" is Slide, and a "block_recurrent" layer is a Block-Recurrent Transformer's with a fixed gate
    and no feed-forward layer on its states.

    Args:
        vocab_size (`int`, *optional*, defaults to 32128): Size of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 1024): Width d of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 12): Number of layers.
        num_attention_heads (`int`, *optional*, defaults to 8): Attention heads H.
        num_key_value_heads (`int`, *optional*): Heads G of keys and values, of tokens and of context states, each for
            H / G query heads; as many as heads by default.
        head_dim (`int`, *optional*, defaults to 128): Size e of a head; H e need not be d.
        attention_bias (`bool`, *optional*, defaults to `False`): Bias in the projections of attention.
        intermediate_size (`int`, *optional*, defaults to 4096): Width of the feed-forward layers.
        hidden_act (`str`, *optional*, defaults to `"relu"`): Their activation.
        gated_mlp (`bool`, *optional*, defaults to `False`): Gated feed-forward layers, down(activation(gate) · up), as
            Llama's with `hidden_act="silu"`.
        sliding_window (`int`, *optional*, defaults to 512): W: tokens a token attends to, and tokens of a block.
        block_types (`list[str]`, *optional*): `"sliding_attention"`, `"bst"` or `"block_recurrent"` for each layer; by
            default from
            `ssm_layers`.
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
        ssm_skip (`bool`, *optional*, defaults to `True`): Its D term.
        ssm_learning_rate (`float`, *optional*, defaults to 1e-3): Of A, B and the step sizes, read by
            `hf_hybrid_ssm.training.optim`; `None` leaves it to the optimizer.
        filter_length (`int`, *optional*, defaults to 4096): Taps of an unstructured filter; zero beyond.
        filter_emb_dim, filter_hidden_size, filter_inner_layers, filter_sin_freq (*optional*, defaults to 33, 64, 2 and
            14.0):
            Features, width, hidden layers and initial frequency of its network.
        filter_fast_decay_pct, filter_slow_decay_pct, filter_decay_target (`float`, *optional*, defaults to 0.3, 1.5
            and 0.01): Its decay rates.
        cross_attention_inclusive (`bool`, *optional*, defaults to `True`): A token sees the context state of its own
            position (`"sh"`, `"mh"`).
        bidirectional (`bool`, *optional*, defaults to `False`): For classification and masked language models: the W
            tokens on each side and the token itself, a two-sided state-space model, and all context states of the
            block (`"sh"`, `"mh"`).
        retrieval_k (`int`, *optional*): Context states of finished blocks that each token retrieves, for each head,
            into the softmax over its block's own; none by default.
        retrieval_memory (`int`, *optional*, defaults to 1024): States of finished blocks that a layer remembers.
        retrieval_stride (`int`, *optional*, defaults to 1): It keeps every n-th of a block's states.
        qk_norm (`bool`, *optional*, defaults to `True`): L2-normalised queries and keys with a learned scale per head;
            otherwise the scale is `1 / sqrt(head_dim)`.
        use_qk_norm (`bool`, *optional*, defaults to `False`): RMSNorm of each head's queries and keys, as in Qwen3;
            with `qk_norm=False`.
        attend_self (`bool`, *optional*, defaults to `False`): A token attends to itself too, besides the W before it.
        zero_kv_sink (`bool`, *optional*, defaults to `True`): Positions before the first token hold zero keys and
            values.
        relative_attention_num_buckets, relative_attention_max_distance (`int`, *optional*, defaults to 32 and 128):
            T5's relative bias.
        rope_parameters (`RopeParameters`, *optional*): Rotary positions of the tokens' queries and keys, in place of
            T5's bias; none by default, as in the paper.
        dropout, attention_dropout, final_dropout (`float`, *optional*, defaults to 0.05): Before attention and after
            the feed-forward layer, on attention weights, before the head.
        layer_norm_epsilon (`float`, *optional*, defaults to 1e-6): Epsilon of the norms.
        initializer_range, context_init_std, context_id_std (`float`, *optional*, defaults to 1.0, 0.1, 1.0): Initial
            deviations of embeddings, initial contexts and context IDs.
        logit_scale (`float`, *optional*): Factor on the logits; `hidden_size ** -0.5` by default.
        tie_word_embeddings (`bool`, *optional*, defaults to `True`): Share embedding and language-model head.
        use_cache (`bool`, *optional*, defaults to `True`): Return the state for continuation.
        use_linear_cross_entropy (`bool`, *optional*, defaults to `False`): When training with labels, compute the loss
            in chunks that never hold all logits; `logits` is then `None`.
        max_position_embeddings (`int`, *optional*, defaults to 4096): Training length; not a limit.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): Special tokens; T5's by default.

    ```python
    >>> from hf_hybrid_ssm import BstConfig, BstForCausalLM

    >>> model = BstForCausalLM(BstConfig.preset("200m", context_variant="mf"))
    ```"""

    model_type = "bst"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    # heads need their biases, scales and context states unsharded: projections are gathered, their outputs split
    base_model_tp_plan: ClassVar[dict[str, str]] = {
        "layers.*.attention.q_proj": "colwise_gather_output",
        "layers.*.attention.k_proj": "colwise_gather_output",
        "layers.*.attention.v_proj": "colwise_gather_output",
        "layers.*.attention.context_q_proj": "colwise_gather_output",
        "layers.*.attention.o_proj": "rowwise_split_input",
        "layers.*.feed_forward.fc1": "colwise",
        "layers.*.feed_forward.fc2": "rowwise",
        "layers.*.feed_forward.gate_proj": "colwise",
        "layers.*.feed_forward.up_proj": "colwise",
        "layers.*.feed_forward.down_proj": "rowwise",
    }
    presets: ClassVar[dict[str, dict]] = {
        "80m": {"hidden_size": 512},
        "200m": {},
        "200m-slide": {"ssm_layers": []},
        "200m-block-recurrent": {
            "block_types": ["block_recurrent" if index == 9 else "sliding_attention" for index in range(12)]
        },
        "400m": {"num_attention_heads": 16, "intermediate_size": 8192, "ssm_layers": [0, 4, 6, 8]},
        "1.3b": {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 16384},
    }

    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "block_types": _block_types,
        "ssm_layers": _bst_layers,
        "ssm_state_size": _state_size,
        "num_key_value_heads": lambda config: config.num_attention_heads,
        "logit_scale": lambda config: 1 / math.sqrt(config.hidden_size) if config.hidden_size > 0 else None,
    }

    vocab_size: int = 32128
    hidden_size: int = 1024
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int = 128
    attention_bias: bool = False
    intermediate_size: int = 4096
    hidden_act: str = "relu"
    gated_mlp: bool = False
    sliding_window: int = 512
    block_types: list[str] | None = None
    ssm_layers: list[int] | None = None
    context_variant: str = "sh"
    num_context_states: int = 32
    recurrent_num_states: int = 512
    ssm_type: str = "s4d"
    ssm_state_size: int | None = None
    ssm_num_dynamics: int | None = None
    ssm_init: str = "legs"
    ssm_discretization: str | None = None
    ssm_dt_min: float = 1e-3
    ssm_dt_max: float = 1e-1
    ssm_input_norm: bool = True
    ssm_skip: bool = True
    ssm_learning_rate: float | None = 1e-3
    filter_length: int = 4096
    filter_emb_dim: int = 33
    filter_hidden_size: int = 64
    filter_inner_layers: int = 2
    filter_sin_freq: float | int = 14.0
    filter_fast_decay_pct: float = 0.3
    filter_slow_decay_pct: float = 1.5
    filter_decay_target: float = 0.01
    cross_attention_inclusive: bool = True
    bidirectional: bool = False
    retrieval_k: int | None = None
    retrieval_memory: int = 1024
    retrieval_stride: int = 1
    qk_norm: bool = True
    use_qk_norm: bool = False
    attend_self: bool = False
    zero_kv_sink: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    rope_parameters: RopeParameters | dict | None = None
    dropout: float | int = 0.05
    attention_dropout: float | int = 0.05
    final_dropout: float | int = 0.05
    layer_norm_epsilon: float = 1e-6
    initializer_range: float | int = 1.0
    context_init_std: float | int = 0.1
    context_id_std: float | int = 1.0
    logit_scale: float | int | None = None
    tie_word_embeddings: bool = True
    use_cache: bool = True
    use_linear_cross_entropy: bool = False
    max_position_embeddings: int = 4096
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    def convert_rope_params_to_dict(self, **kwargs) -> dict[str, Any]:
        """As in transformers, but None stays None: T5's bias."""
        if self.rope_parameters is None and not {"rope_scaling", "rope_theta"} & kwargs.keys():
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache layer each block needs: always our own."""
        return [STATE_LAYER_TYPE] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        indices, layers = self.ssm_layers, self.num_hidden_layers
        if len(set(indices)) != len(indices) or any(not 0 <= index < layers for index in indices):
            raise ValueError(
                f"ssm_layers={indices} must name different layers from 0 to {layers - 1} (num_hidden_layers={layers})."
            )
        actual = [index for index, block_type in enumerate(self.block_types) if block_type == "bst"]
        if sorted(indices) != actual:
            raise ValueError(f"ssm_layers={indices} contradicts block_types, whose bst layers are {actual}.")
        self.check_block_types(BLOCK_TYPES)

    def validate_architecture(self) -> None:
        """Sizes that fit together."""
        self.check_positive(
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "sliding_window", "num_context_states", "ssm_state_size", "ssm_dt_min", "ssm_dt_max",
            "filter_length",
            "filter_hidden_size", "relative_attention_max_distance", "layer_norm_epsilon",
            "max_position_embeddings", "logit_scale", "recurrent_num_states", "ssm_learning_rate", "filter_sin_freq",
        )  # fmt: skip
        self.check_not_negative("filter_inner_layers", "initializer_range", "context_init_std", "context_id_std")
        self.check_dropout("dropout", "attention_dropout", "final_dropout")
        self.check_activation("hidden_act")
        self.check_choice("context_variant", ("sh", "mh", "mf"))
        self.check_choice("ssm_init", ("legs", "inv", "lin"))
        mixer = check_mixer_fields(self)
        if self.context_variant != "sh" and not mixer.supports_filters:
            several = [name for name, other in MIXERS.items() if other.supports_filters]
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
        if self.bidirectional and (self.context_variant == "mf" or "block_recurrent" in (self.block_types or [])):
            raise ValueError(
                "bidirectional=True has no meaning for context_variant='mf' or 'block_recurrent' layers, whose states "
                f"come only from earlier blocks; got context_variant={self.context_variant!r} and "
                f"block_types={self.block_types}."
            )
        self._check_retrieval()
        self.check_grouped_heads()
        if self.qk_norm and self.use_qk_norm:
            raise ValueError("use_qk_norm=True needs qk_norm=False: queries and keys have one norm.")
        if self.rope_parameters is None:
            self.check_relative_bias(two_sided=self.bidirectional)
        else:
            self.check_rope()

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
        if self.bidirectional or "bst" not in (self.block_types or []):
            raise ValueError(
                f"retrieval_k={self.retrieval_k} needs 'bst' layers that look back; got bidirectional="
                f"{self.bidirectional}, block_types={self.block_types}."
            )


# transformers copies the files that a file names; a configuration that is saved alone brings its models along
if TYPE_CHECKING:
    from .modeling_bst import BstForMaskedLM  # noqa: F401
