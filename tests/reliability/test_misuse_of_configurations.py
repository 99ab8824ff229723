"""Configurations with fields of a wrong type, out of range, or that contradict each other; unknown presets.

The wrong values follow from a field's type, so that a field without a check is found when it is added. What single
families, mixers and ops refuse, and in which words, is in tests/models, tests/layers and tests/ops.
"""

import dataclasses
import math
import re
from typing import get_args

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

import hf_hybrid_ssm
from hf_hybrid_ssm.models import FAMILIES
from tests.reliability.refusals import assert_refused, mistakes
from tests.tiny_models import EVERY, class_with_loss, classes_of, config_of

WRONG: dict[type, tuple] = {
    bool: ("yes", 2),
    list: (["nonsense"], [99], [-1], "all", 7),
    str: ("nonsense", "", 7),
    float: (-1.0, math.nan, math.inf, "0.1"),
    int: (-1, 0, "3", 2.5),
}
TOKEN_ID = ("3", 2.5)  # which ids there are is the vocabulary's matter
# by field, values that mean something after all, or are refused in words of their own
EXCEPTIONS = {
    "time_step_rank": (7,),
    "pixel_mean": (-1.0, math.nan, math.inf),
}


def own_fields(config_class: type) -> list[str]:
    """The fields that a family declares, not transformers."""
    return [field.name for field in dataclasses.fields(config_class) if field.name in config_class.__annotations__]


def wrong_values(config_class: type, field: str) -> list:
    """Values that no combination with other fields makes legal."""
    declared = config_class.__dataclass_fields__[field].type  # type: ignore[attr-defined]
    kinds = [getattr(kind, "__origin__", kind) for kind in get_args(declared) or (declared,)]
    values = TOKEN_ID if field.endswith("token_id") else next((WRONG[kind] for kind in WRONG if kind in kinds), ())
    optional = () if type(None) in kinds else (None,)
    return [value for value in (*values, *optional) if value not in EXCEPTIONS.get(field, ())]


def refusal(variant: str, fields: dict) -> str | None:
    """What a configuration, or the model that is built from it, says to its fields."""
    try:
        classes_of(variant)[class_with_loss(variant)](config_of(variant, **fields))
    except (ValueError, StrictDataclassError) as error:
        return str(error)
    return None


FIELDS = [
    (family.model_type, field) for family in FAMILIES for field in own_fields(getattr(hf_hybrid_ssm, family.config))
]


@pytest.mark.parametrize(("model_type", "field"), FIELDS)
def test_wrong_values(model_type, field):
    """Refused by the field's name, and by the value or its type, at least where some variant reads the field."""
    variants = [name for name, (of, _) in EVERY.items() if of == model_type]
    for value in wrong_values(type(config_of(variants[0])), field):
        told = next((told for variant in variants if (told := refusal(variant, {field: value}))), "nothing")
        name = re.sub("^(ssm|filter|ema|s5)_|_(dim|pct)$", "", field)  # as its mixer calls it
        assert name in told, f"{field}={value!r}: {told}"
        assert isinstance(value, list) or repr(value) in told or type(value).__name__ in told, f"{value!r}: {told}"


LONGHORN, BST, SPADE = "longhorn + window and full attention", "bst sh s4d", "spade s4 window"
CONTRADICTIONS = [
    (LONGHORN, {"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_heads=3"),
    (LONGHORN, {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta.*-1.0.*positive"),
    (LONGHORN, {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type='spiral' is not one of"),
    (
        LONGHORN,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 turns some channels of a head, and all of them are",
    ),
    (LONGHORN, {"attn_implementation": "lightning"}, 'attn_implementation="lightning"` is not supported.*eager'),
    (BST, {"relative_attention_num_buckets": 3}, "relative_attention_num_buckets=3 must be a multiple of 2"),
    (BST, {"relative_attention_max_distance": 2}, "must exceed half of relative_attention_num_buckets=8"),
    (BST, {"ssm_dt_min": 0.2}, "ssm_dt_min=0.2 must be at most ssm_dt_max=0.1"),
    (BST, {"ssm_num_dynamics": 5}, "num_dynamics must divide the 24 systems, got 5"),
    (SPADE, {"adaptive_cutoffs": [61]}, r"adaptive_cutoffs=\[61\] must rise from at least 1 to below vocab_size"),
    (SPADE, {"adaptive_cutoffs": [20], "adaptive_factor": 5}, "hidden_size=24 must be divisible by adaptive_factor"),
    (SPADE, {"ssm_dt_min": 0.2}, "ssm_dt_min=0.2 must be at most ssm_dt_max=0.1"),
    (SPADE, {"paired_input": True}, "paired_input=True are for classification"),
    (SPADE, {"num_labels": 0}, "num_labels=0 must be positive"),
    ("encoder-decoder", {"decoder_start_token_id": 61}, "decoder_start_token_id=61 must lie below vocab_size=61"),
    ("encoder-decoder", {"is_encoder_decoder": False}, "is_encoder_decoder=False contradicts SpadeSeq2SeqConfig"),
]


@mistakes(CONTRADICTIONS, "variant, fields, words")
def test_fields_that_do_not_fit(variant, fields, words):
    head = classes_of(variant)[class_with_loss(variant)]
    assert_refused(lambda: head(config_of(variant, **fields)), f"Exception: {words}")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_presets_and_configurations_of_other_families(family):
    """A preset of another name, and every class with the configuration of another family."""
    config_class = getattr(hf_hybrid_ssm, family.config)
    for name in ("125b", 200):
        assert_refused(lambda name=name: config_class.preset(name), f"ValueError: no preset {name!r}; it has '")
    other = config_of("longhorn" if family.model_type != "longhorn" else "lmu-isa")
    for head in {getattr(hf_hybrid_ssm, name) for name in family.heads.values()}:
        words = f"{head.__name__}.*{family.config}.*got {type(other).__name__}"
        assert_refused(lambda head=head: head(other), f"TypeError: {words}")


def test_what_nobody_reads_raises_nothing():
    """As everywhere in transformers."""
    assert AutoConfig.for_model("longhorn", hiden_size=64).hiden_size == 64
    AutoConfig.for_model("longhorn", vocab_size=9, eos_token_id=50256)  # generation never meets it
