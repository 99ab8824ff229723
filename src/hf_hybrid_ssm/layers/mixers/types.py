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
