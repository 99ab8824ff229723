"""Every long-range mixer by its name in a config."""

from typing import Any

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.layers.mixers.hyena import Hyena, ImplicitLongConv
from hf_hybrid_ssm.layers.mixers.lstm import LSTM
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.layers.mixers.s5 import S5

MIXERS: dict[str, type[Mixer]] = {
    "s4": S4,
    "s4d": S4D,
    "s5": S5,
    "hyena": Hyena,
    "unstructured": ImplicitLongConv,
    "ema": EMA,
    "lstm": LSTM,
}


def build_mixer(name: str, hidden_size: int, *, frozen: bool = False, **options: Any) -> Mixer:
    """The mixer called `name` for `hidden_size` channels.

    Args:
        name: a key of `MIXERS`.
        frozen: shorthand for `trainable="none"`.
        options: of the mixer's class (`bidirectional`, `trainable`, `state_size`, ...).

    Raises:
        ValueError: there is no such mixer, or it has no such option.
    """
    if name not in MIXERS:
        raise ValueError(f"There is no mixer {name!r}; choose one of {', '.join(sorted(MIXERS))}.")
    if frozen:
        if options.get("trainable", "none") != "none":
            raise ValueError(f"frozen=True contradicts trainable={options['trainable']!r}.")
        options["trainable"] = "none"
    try:
        return MIXERS[name](hidden_size, **options)
    except TypeError as error:
        raise ValueError(f"The mixer {name!r} does not take these options: {error}.") from error
