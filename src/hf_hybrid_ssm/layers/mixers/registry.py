"""Every long-range mixer by its name in a configuration (`ssm_type`), and what it reads of one."""

from collections.abc import Mapping
from typing import Any

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.layers.mixers.hyena import Hyena, ImplicitLongConv
from hf_hybrid_ssm.layers.mixers.lstm import LSTM
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.layers.mixers.s5 import S5
from hf_hybrid_ssm.layers.mixers.types import MIXER_TYPES

MIXERS: dict[str, type[Mixer]] = {
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "hyena": Hyena,
    "unstructured": ImplicitLongConv,
    "ema": EMA,
    "lstm": LSTM,
}
BUILT_IN = frozenset(MIXERS)
CONFIG_OPTIONS_OF_ALL = {"trainable": "ssm_trainable"}
_CONFIG_OPTIONS: dict[str, dict[str, str]] = {}  # of mixers registered with options other than their class's


def register_mixer(name: str, mixer: type[Mixer], *, config_options: Mapping[str, str] | None = None) -> None:
    """Make a mixer of your own available to SPADE and BST as `ssm_type=name`.

    Args:
        name: as in a configuration.
        mixer: a subclass of `Mixer`. One of the same module and name takes the place of an earlier one, as when the
            cell of a notebook is run again.
        config_options: option of its constructor → field of the configuration that holds it, a new one perhaps; an
            option whose field a configuration lacks has its default. None: those of the class, `mixer.config_options`.

    Raises:
        TypeError: `mixer` is not a subclass of `Mixer`.
        ValueError: another mixer has the name.
    """
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise TypeError(f"mixer must be a subclass of Mixer, got {mixer!r}.")
    known = MIXERS.get(name, mixer)
    if (known.__module__, known.__qualname__) != (mixer.__module__, mixer.__qualname__):
        raise ValueError(
            f"There is a mixer {name!r} already, {known.__module__}.{known.__qualname__}; choose another."
        )
    MIXERS[name] = MIXER_TYPES[name] = mixer
    _CONFIG_OPTIONS[name] = dict(mixer.config_options if config_options is None else config_options)


def build_mixer(name: str, hidden_size: int, **options: Any) -> Mixer:
    """The mixer called `name` for `hidden_size` channels.

    Args:
        name: a key of `MIXERS`.
        options: of the mixer's class (`bidirectional`, `trainable`, `state_size`, ...).

    Raises:
        ValueError: there is no such mixer, or it has no such option.
    """
    if name not in MIXERS:
        raise ValueError(f"There is no mixer {name!r}; choose one of {', '.join(sorted(MIXERS))}.")
    try:
        return MIXERS[name](hidden_size, **options)
    except TypeError as error:
        raise ValueError(f"The mixer {name!r} does not take these options: {error}.") from error


def mixer_from_config(config: Any, **options: Any) -> Mixer:
    """The mixer `config.ssm_type` of `config.hidden_size` channels, with the options that it reads from the
    configuration and those given (`bidirectional`, `num_filters`)."""
    name = config.ssm_type
    fields = CONFIG_OPTIONS_OF_ALL | _CONFIG_OPTIONS.get(name, MIXERS[name].config_options)
    read = {option: getattr(config, field) for option, field in fields.items() if hasattr(config, field)}
    return build_mixer(name, config.hidden_size, **read | options)
