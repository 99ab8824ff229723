"""Checks of a config.json that may be untrusted: no remote code, no overridden methods, bounded sizes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# What transformers has inside. Others ("flash_attention_2", a repository of kernels) are code that it may fetch: they
# are for whoever loads the model to choose.
INSIDE = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
}
LAYERS = ("num_hidden_layers", "num_decoder_layers", "num_layers", "n_layer", "n_layers")
MOST = dict.fromkeys(LAYERS, 1024) | {"num_labels": 1 << 16}
MOST_ENTRIES = 1 << 17  # of a list or an object
LONGEST = 1 << 16  # letters of a string


def check_saved_configuration(saved: Mapping[str, Any], config_class: type) -> None:
    """A ValueError that names the first field that a saved configuration of this class may not have, or not so."""
    check_sizes(saved)
    fields = {field.name for field in dataclasses.fields(config_class)} | {"model_type"}
    for name, value in saved.items():
        _check_implementations(name, value)
        known = getattr(config_class, name, None)
        if known is not None and name not in fields and not isinstance(known, property):
            raise ValueError(f"{name} is a part of {config_class.__name__} itself, and no field of a configuration.")


def check_sizes(saved: Mapping[str, Any]) -> None:
    """A ValueError that names the first field of any configuration, or of one inside of it, that is beyond what is
    read or built."""
    for name, value in saved.items():
        if isinstance(value, dict):
            check_sizes(value)
        most = MOST.get(name)
        if most is not None and isinstance(value, int) and value > most:
            raise ValueError(f"{name}={value} is beyond {most:,}, the most that is built of a saved configuration.")
        if isinstance(value, list | dict) and len(value) > MOST_ENTRIES:
            raise ValueError(f"{name} has {len(value):,} entries, and at most {MOST_ENTRIES:,} are read.")
        if isinstance(value, str) and len(value) > LONGEST:
            raise ValueError(f"{name} has {len(value):,} letters, and at most {LONGEST:,} are read.")


def _check_implementations(name: str, value: Any) -> None:
    """`check_implementation` of a saved field, and of those of a configuration inside of it."""
    chooses = str(name).removeprefix("_").removesuffix("_internal")
    check_implementation(chooses, value)
    if isinstance(value, dict) and chooses not in INSIDE:
        for inner, chosen in value.items():
            _check_implementations(inner, chosen)


def check_implementation(name: str, value: Any) -> None:
    """A ValueError if a field that chooses an implementation (by part of the model, where it is an object) names one
    that transformers does not have inside."""
    if name not in INSIDE:
        return
    for chosen in value.values() if isinstance(value, dict) else (value,):
        if chosen is not None and chosen not in INSIDE[name]:
            raise ValueError(
                f"{name}={chosen!r} is not among {', '.join(map(repr, INSIDE[name]))}, which transformers has inside: "
                "a saved configuration chooses no other; give it to from_pretrained instead."
            )
