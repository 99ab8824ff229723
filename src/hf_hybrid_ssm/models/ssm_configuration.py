"""What configurations that choose a state-space model (`ssm_type`) share: its fields, and their checks."""

from dataclasses import dataclass
from typing import Any

from hf_hybrid_ssm.layers.mixers.types import MIXER_TYPES
from hf_hybrid_ssm.models.configuration import HybridConfigMixin


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class SsmConfigMixin(HybridConfigMixin):
    """`HybridConfigMixin` with the fields that mixers read; a family documents them, and may add more or change their
    defaults."""

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
        name, size = self.ssm_type, self.ssm_state_size
        self.check_positive("ssm_state_size", "ssm_dt_min", "ssm_dt_max", "filter_length")
        self.check_order("ssm_dt_min", "ssm_dt_max")
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
