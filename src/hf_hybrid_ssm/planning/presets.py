"""Every preset by its name, "longhorn/125m", and its model without memory."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.hub.configurations import without_memory
from hf_hybrid_ssm.models import FAMILIES, family_of

DECODERS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")
OF_VOCABULARY = (*DECODERS, "MASKED_LM")
"""Heads whose logits are of the vocabulary."""


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


def head_of(config: PreTrainedConfig) -> str:
    """What a configuration's model is for: its key of `Family.heads` without MODEL_FOR_, or MODEL for a base model."""
    family = family_of(config.model_type)
    heads = {name: table for table, name in reversed(family.heads.items())}  # the first of several with one class
    return heads[family.main_class(config)].removeprefix("MODEL_FOR_")


def has_state(config: PreTrainedConfig) -> bool:
    """Whether its model decodes, or is the base of one that does."""
    head = head_of(config)
    return head in DECODERS or (head == "MODEL" and not family_of(config.model_type).is_classifier(config))


def meta_model(config: PreTrainedConfig, dtype: str = "float32") -> PreTrainedModel:
    """The model of a configuration (`Family.main_class`), on the meta device: shapes without memory."""
    family = family_of(config.model_type)
    model_class = family.load(family.main_class(config))
    return without_memory(lambda: model_class._from_config(config, dtype=getattr(torch, dtype)))
