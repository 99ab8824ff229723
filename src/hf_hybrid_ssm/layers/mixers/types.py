"""What a configuration must know of every mixer (`ssm_type`) before one is built: it does without torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MixerType:
    """The attributes of a mixer's class that have these names; `Mixer` describes them."""

    default_state_size: int | None = None
    conjugate_pairs: bool = False
    supports_filters: bool = False
    trainable_choices: tuple[str, ...] = ("all", "none")
    discretizations: tuple[str, ...] = ()


_PARTLY: dict[str, Any] = {"trainable_choices": ("all", "output", "none")}
_PAIRS: dict[str, Any] = {"conjugate_pairs": True, "supports_filters": True, **_PARTLY}
# a mixer that someone registers is its class, which has these attributes
MIXER_TYPES: dict[str, Any] = {
    "s4": MixerType(64, discretizations=("bilinear",), **_PAIRS),
    "s4d": MixerType(64, discretizations=("zoh", "bilinear"), **_PAIRS),
    "s5": MixerType(256, discretizations=("zoh",), **_PAIRS),
    "hyena": MixerType(),
    "unstructured": MixerType(supports_filters=True),
    "ema": MixerType(16, **_PARTLY),
    "lstm": MixerType(),
}


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class SsmConfigMixin:
    """The fields that mixers read, before a `HybridConfigMixin`; a family documents them, and may add more or change
    their defaults."""

    ssm_type: str = "s4d"
    ssm_state_size: int | None = None
    ssm_num_dynamics: int | None = None
    ssm_dt_min: float = 1e-3
    ssm_dt_max: float = 1e-1
    filter_length: int = 4096

    def check_ssm(self) -> Any:
        """The `MixerType` of `ssm_type`, or the class registered under that name, whose fields must be possible.

        Raises:
            ValueError: there is no such mixer, a field is out of range, or `ssm_state_size` is odd and the states are
                pairs.
        """
        config: Any = self
        config.check_positive("ssm_state_size", "ssm_dt_min", "ssm_dt_max", "filter_length")
        if self.ssm_dt_min > self.ssm_dt_max:
            raise ValueError(f"ssm_dt_min={self.ssm_dt_min} must be at most ssm_dt_max={self.ssm_dt_max}.")
        name, size = self.ssm_type, self.ssm_state_size
        if name not in MIXER_TYPES:
            raise ValueError(
                f"ssm_type={name!r} is not one of {', '.join(map(repr, MIXER_TYPES))}; one of your own is made known "
                "by hf_hybrid_ssm.register_mixer."
            )
        if size is not None and size % 2 and MIXER_TYPES[name].conjugate_pairs:
            raise ValueError(
                f"ssm_state_size={size} must be even for ssm_type={name!r}: its states are conjugate pairs."
            )
        return MIXER_TYPES[name]


def default_state_size(config: Any) -> int | None:
    """`ssm_state_size` where nobody has set it: the default of the mixer's class, if it has the option."""
    return getattr(MIXER_TYPES.get(config.ssm_type), "default_state_size", None)
