"""A folder that was saved with a field of old is read as it was; another value of that field is refused by name."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig

import hf_hybrid_ssm
from hf_hybrid_ssm.models.families import FAMILIES
from hf_hybrid_ssm.models.removed_fields import OF_NEW_MODELS, REMOVED, without_removed_fields

CONFIGS = {family.model_type: getattr(hf_hybrid_ssm, family.config) for family in FAMILIES}
CASES = [(kind, name, value) for kind, fields in REMOVED.items() for name, value in fields.items()]


def other_than(value):
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else f"not {value}"


def saved_with(kind, folder, **fields):
    CONFIGS[kind]().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize("kind", REMOVED)
def test_what_every_old_folder_says_is_dropped_without_a_word(kind, tmp_path, caplog):
    saved = saved_with(kind, tmp_path, **REMOVED[kind])
    config, direct = AutoConfig.from_pretrained(saved), CONFIGS[kind](**REMOVED[kind])
    assert config.to_dict() == AutoConfig.from_pretrained(saved_with(kind, tmp_path)).to_dict()
    assert direct.to_dict() == CONFIGS[kind]().to_dict()
    assert not REMOVED[kind].keys() & config.to_dict().keys() and not caplog.records


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_another_value_is_refused_by_name(kind, name, value, tmp_path):
    message = rf"{name}={other_than(value)!r} is no longer an option of model_type='{kind}'.*{name}={value!r}"
    with pytest.raises(ValueError, match=message):
        CONFIGS[kind](**{name: other_than(value)})
    saved = saved_with(kind, tmp_path, **{name: other_than(value)})
    if name in OF_NEW_MODELS:  # the weights are there
        assert (
            AutoConfig.from_pretrained(saved).to_dict()
            == AutoConfig.from_pretrained(saved_with(kind, tmp_path)).to_dict()
        )
        return
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(saved)


@pytest.mark.parametrize(("kind", "name", "value"), CASES)
def test_a_model_is_not_built_of_a_configuration_that_got_one_later(kind, name, value):
    config = CONFIGS[kind]()
    setattr(config, name, other_than(value))
    family = next(family for family in FAMILIES if family.model_type == kind)
    with torch.device("meta"), pytest.raises(ValueError, match=f"{name}=.* is no longer an option"):
        getattr(hf_hybrid_ssm, family.main_class(config))(config)


def test_every_field_of_new_models_is_one_that_went():
    assert {name for _, name, _ in CASES} >= OF_NEW_MODELS


def test_no_field_is_both_there_and_gone():
    assert REMOVED.keys() <= CONFIGS.keys() and CASES
    fields = {kind: {field.name for field in dataclasses.fields(config)} for kind, config in CONFIGS.items()}
    assert [case for case in CASES if case[1] in fields[case[0]]] == []


def test_a_family_of_ones_own_loses_nothing():
    assert without_removed_fields("another", {"ssm_learning_rate": 2}) == {"ssm_learning_rate": 2}
