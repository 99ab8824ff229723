"""Every preset by its name, "longhorn/125m", and its model without memory."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.hub.configurations import without_memory
from hf_hybrid_ssm.models import FAMILIES, family_of


def preset_names() -> list[str]:
    """family/preset of every preset of every family."""
    presets = ((family, family.load(family.config).presets) for family in FAMILIES)
    return [f"{family.model_type}/{preset}" for family, names in presets for preset in names]


def preset_config(name: str) -> PreTrainedConfig:
    """The configuration of "family/preset".

    Raises:
        ValueError: there is no such family or preset.
    """
    model_type, _, preset = name.partition("/")
    family = family_of(model_type)
    return family.load(family.config).preset(preset)


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether a configuration is only for classification."""
    return family_of(config.model_type).is_classifier(config)


def meta_model(config: PreTrainedConfig, dtype: str = "float32") -> PreTrainedModel:
    """The language model (or the classifier) of a configuration, on the meta device: shapes without memory."""
    family = family_of(config.model_type)
    model_class = family.load(family.main_class(config))
    return without_memory(lambda: model_class._from_config(config, dtype=getattr(torch, dtype)))
