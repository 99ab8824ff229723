"""What the configurations of all families share: presets, derived fields, and checks."""

import dataclasses
import difflib
import logging
import math
import os
import reprlib
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from transformers import PreTrainedConfig

# Types of layers whose cache holds named states, of a recurrence or with the keys of all tokens. They are here rather
# than beside the cache, since configurations do without torch.
STATE_LAYER_TYPE = "hybrid_ssm_state"
STATE_AND_KEYS_LAYER_TYPE = "hybrid_ssm_state_and_keys"
STATE_LAYER_TYPES = [STATE_LAYER_TYPE, STATE_AND_KEYS_LAYER_TYPE]
"""All types whose cache holds such states; a family adds those of its own (`state_layer_types`)."""

SAVED_LAYER_TYPES = "block_types"
"""What `layer_types` is called in a config.json: resuming and tokenizers read one as transformers' base class, which
refuses other layer types than transformers' own under that name."""
GPT2_END_OF_TEXT = 50256
# what a config.json may hold beside the fields of its configuration
EXTRA_FIELDS = frozenset({"auto_map", "custom_pipelines", "quantization_config"})
logger = logging.getLogger(__name__)

T = TypeVar("T")
if TYPE_CHECKING:
    Derived = Annotated[T, "derived"]
    from transformers import PreTrainedConfig as _Mixed  # what a mixin stands before
else:
    Derived = T | None
    _Mixed = object
"""A field that is computed from other fields unless it is set; None stands for the default, and is never read."""
DERIVED: Any = None


@dataclasses.dataclass
class Hooks:
    """What the levels above models add to loading, saving and generation, filled in by `hf_hybrid_ssm.auto`: models
    import nothing from above. Exported code runs alone, with `load` and `register_layer_types` of its own.

    Args:
        check_configuration: raises a ValueError if a saved configuration, of a class, holds what it may not.
        load: `from_pretrained` of transformers and its arguments → what it returns.
        generate: model, its `generate`, a cache of prefixes or None, arguments → what `generate` returns.
        save_configuration: configuration with an `auto_map`, its `save_pretrained`, arguments → None.
        choose_code: model, whether its code is to be saved with it, folder or None → None.
        register_layer_types: gives transformers' caches a layer for each of `STATE_LAYER_TYPES`.
    """

    check_configuration: Callable[[Any, type], None] | None = None
    load: Callable[..., Any] | None = None
    generate: Callable[..., Any] | None = None
    save_configuration: Callable[..., None] | None = None
    choose_code: Callable[..., None] | None = None
    register_layer_types: Callable[[], None] | None = None


HOOKS = Hooks()


def gpt2_end_of_text(config: Any) -> int | None:
    """The token that begins and ends a text, where the vocabulary has it."""
    return GPT2_END_OF_TEXT if config.vocab_size > GPT2_END_OF_TEXT else None


@cache
def _warn_once(message: str) -> None:
    """Configurations are copied and made again by transformers; one warning is enough."""
    logger.warning(message)


class SavedWithCode(_Mixed):
    """A configuration that takes along the code of its models; placed before `PreTrainedConfig`."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs) -> None:
        """As in transformers; a configuration with an `auto_map` takes along the code that this names."""
        save = super().save_pretrained
        if HOOKS.save_configuration is not None and getattr(self, "auto_map", None):
            save = partial(HOOKS.save_configuration, self, save)
        save(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers: the configuration, and the unused keyword arguments if asked.

        Raises:
            ValueError: what is saved may not be (see `hf_hybrid_ssm.hub.saved_configuration`).
        """
        if HOOKS.check_configuration is not None:
            HOOKS.check_configuration(config_dict, cls)
        return super().from_dict(config_dict, **kwargs)


class HybridConfigMixin(SavedWithCode):
    """Presets by name, derived fields, and checks with readable errors; placed before `PreTrainedConfig`.

    A derived field follows the fields it is computed from until someone sets it; setting it to its default (`None`)
    makes it follow again. It always holds its value, so `config.json` is complete.

    Arguments are documented by hand: transformers' `auto_docstring` fills in those of its own models, whose defaults
    and meanings (of windows, dropouts, state sizes) are not ours.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]
    base_model_pp_plan: ClassVar[dict[str, tuple[list[str], list[str]]] | None] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    presets: ClassVar[dict[str, dict]] = {}
    # field → its value, given the configuration; a field comes after those it is computed from
    derived: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    # those of `layer_types` whose cache holds states
    state_layer_types: ClassVar[tuple[str, ...]] = ()
    _following: frozenset[str]

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init_subclass__(*args, **kwargs)
        STATE_LAYER_TYPES.extend(kind for kind in cls.state_layer_types if kind not in STATE_LAYER_TYPES)
        if HOOKS.register_layer_types is not None:
            HOOKS.register_layer_types()

    def __post_init__(self, **kwargs):
        is_saved = self.transformers_version is not None
        fields = self.__dataclass_fields__
        if "layer_types" in fields and getattr(self, "layer_types", None) is None and SAVED_LAYER_TYPES in kwargs:
            self.layer_types = kwargs.pop(SAVED_LAYER_TYPES)
        self._following = frozenset(name for name in self.derived if getattr(self, name, None) == fields[name].default)
        if is_saved:
            # A saved configuration names every field; what equals the derived value was derived then, and is again.
            for name, value in self.derived.items():
                if getattr(self, name, None) == value(self):
                    self._following |= {name}
        self._derive()
        # The strict dataclass runs these again, but wraps what they raise; here a plain ValueError comes out.
        self.validate_layer_type()
        self.validate_architecture()
        num_labels = kwargs.get("num_labels")
        if isinstance(num_labels, int) and num_labels < 1:
            raise ValueError(f"num_labels={num_labels} must be positive.")
        super().__post_init__(**kwargs)
        for name in kwargs:
            self._warn_of_unknown(name)

    def _warn_of_unknown(self, name: str) -> None:
        """transformers keeps every other keyword as an attribute, a misspelt field too."""
        fields = self.__dataclass_fields__
        is_known = name in fields or name in EXTRA_FIELDS or name.startswith("_") or hasattr(type(self), name)
        if is_known or name not in self.__dict__:  # what transformers read is not kept
            return
        meant = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean {meant[0]}?" if meant else "."
        _warn_once(f"{type(self).__name__} has no field {name}, and nothing reads it{hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_computed(name, value):
            return
        super().__setattr__(name, value)
        fields = self.__dataclass_fields__
        if "_following" not in self.__dict__ or name not in fields:  # the former while the fields are first filled
            return
        if name in self.derived:
            self._following -= {name}
            if value == fields[name].default:
                self._following |= {name}
        self._derive()

    def _is_computed(self, name: str, value: Any) -> bool:
        """Whether `name` is a property that has this value: there is nothing to set.

        Raises:
            ValueError: the property has another one, which follows from fields.
        """
        own = getattr(type(self), name, None)
        if not isinstance(own, property) or own.fset is not None:
            return False
        if (computed := getattr(self, name)) != value:
            about = " ".join((own.__doc__ or "").split())
            raise ValueError(
                f"{name}={reprlib.repr(value)} cannot be set: it is no field of {type(self).__name__} and follows "
                f"from others, here {reprlib.repr(computed)}.{about and ' ' + about}"
            )
        return True

    def _derive(self) -> None:
        for name, value in self.derived.items():
            if self.follows(name):
                object.__setattr__(self, name, value(self))

    def follows(self, name: str) -> bool:
        """Whether the field has its derived value, because nobody has set it."""
        return name in self._following

    def to_dict(self) -> dict[str, Any]:
        """As in transformers: every field with its value; `layer_types` by the name that it is saved under."""
        output = super().to_dict()
        output.pop("_following", None)
        if "layer_types" in self.__dataclass_fields__:
            output[SAVED_LAYER_TYPES] = output.pop("layer_types")
        return output

    def validate_layer_type(self) -> None:
        """Overridden by configurations whose `layer_types` is a field."""

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
        return cls(**{**cls.presets[name], **overrides})

    def check_positive(self, *names: str) -> None:
        """Each named field must be > 0 and finite (None is allowed)."""
        for name in names:
            value = getattr(self, name, None)
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
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
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

    def check_layer_types(self, choices: tuple[str, ...]) -> None:
        """`layer_types` must name one of `choices` for each layer."""
        kinds, layers = self.layer_types, self.num_hidden_layers
        if len(kinds) != layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, but num_hidden_layers={layers}.")
        if unknown := sorted(set(kinds) - set(choices)):
            raise ValueError(f"layer_types contains {unknown}; a layer is one of {', '.join(map(repr, choices))}.")
