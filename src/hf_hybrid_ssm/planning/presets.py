"""Every preset by its name, "longhorn/125m", and its model without memory."""

import importlib

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.auto import FAMILIES

HEADS = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM")
CLASSIFIER = "MODEL_FOR_SEQUENCE_CLASSIFICATION"


def preset_names() -> list[str]:
    """family/preset of every preset of every family."""
    names = []
    for family in FAMILIES:
        config = getattr(importlib.import_module(family.package), family.config)
        names += [f"{family.model_type}/{preset}" for preset in config.presets]
    return names


def preset_config(name: str) -> PreTrainedConfig:
    """The configuration of "family/preset".

    Raises:
        ValueError: there is no such family or preset.
    """
    model_type, _, preset = name.partition("/")
    for family in FAMILIES:
        if family.model_type == model_type:
            return getattr(importlib.import_module(family.package), family.config).preset(preset)
    raise ValueError(f"There is no preset {name!r}; a preset is one of {', '.join(preset_names())}.")


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether a configuration is for classification alone: it pools all tokens, or sees those that follow."""
    return getattr(config, "pooling", "first") == "mean" or bool(getattr(config, "bidirectional", False))


def meta_model(config: PreTrainedConfig, dtype: str = "float32") -> PreTrainedModel:
    """The language model (or the classifier) of a configuration, on the meta device: shapes without memory."""
    family = next(family for family in FAMILIES if family.model_type == config.model_type)
    head = CLASSIFIER if is_classifier(config) else next(head for head in HEADS if head in family.heads)
    model_class = getattr(importlib.import_module(family.package), family.heads[head])
    with torch.device("meta"):
        return model_class._from_config(config, dtype=getattr(torch, dtype))
