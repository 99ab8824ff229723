"""Misspelt and impossible fields: the classes warn by name, what is asked for by name is refused."""

import json
import logging

import pytest
from transformers import AutoConfig

from hf_hybrid_ssm.hub.configurations import check_fields, config_of_folder, new_config, with_fields
from hf_hybrid_ssm.models import FAMILIES, configuration
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig


@pytest.fixture
def said(caplog):
    configuration._warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    yield lambda: [record.getMessage() for record in caplog.records]
    configuration._warn_once.cache_clear()


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
def test_a_misspelt_field_is_named(family, said, tmp_path):
    misspelt = AutoConfig.for_model(family, hiden_size=64)
    for _ in range(2):  # said once, also of what is read from a file
        misspelt.save_pretrained(tmp_path)
        AutoConfig.from_pretrained(tmp_path)
    assert said() == [
        f"{type(misspelt).__name__} has no field hiden_size, and nothing reads it; did you mean hidden_size?"
    ]


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
def test_what_transformers_takes_is_not_called_misspelt(family, said, tmp_path):
    labels = {"num_labels": 3} | ({"problem_type": "regression"} if family != "spade_seq2seq" else {})
    config = AutoConfig.for_model(family, **labels, torch_dtype="float32", attn_implementation="eager", top_k=3)
    more = {"auto_map": {"AutoConfig": "x.y"}, "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | more), encoding="utf-8")
    AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    assert said() == []


def test_longhorns_heads_divide_its_width():
    attention = {"layer_types": ["full_attention"], "num_hidden_layers": 1}
    with pytest.raises(ValueError, match=r"hidden_size=30 must be a multiple of num_attention_heads=4"):
        LonghornConfig(hidden_size=30, num_attention_heads=4, **attention)
    LonghornConfig(hidden_size=30, num_attention_heads=4)  # no layer attends
    config = LonghornConfig(hidden_size=30, num_attention_heads=4, head_dim=16, **attention)
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (
            ("longhorn",),
            {"hiden_size": 8},
            "config.hiden_size: LonghornConfig has no such field; did you mean hidden_",
        ),
        (("llama",), {"hidden_sizes": 8}, "config.hidden_sizes: LlamaConfig has no such field"),
        (("longhron",), {}, "model_type='longhron' is not known to transformers; did you mean longhorn"),
        (("longhorn", "125"), {}, "has no preset '125'"),
        (("llama", "125m"), {}, "LlamaConfig has none"),
        (("longhorn",), {"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        (("longhorn",), {"hidden_size": -1}, "hidden_size=-1 must be positive"),
    ],
)
def test_new_configurations_are_refused_in_one_line(arguments, fields, message):
    with pytest.raises(ValueError) as refused:
        new_config(*arguments, **fields)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_other_values_of_some_fields():
    config = new_config("longhorn", num_hidden_layers=2)
    changed = with_fields(config, {"num_hidden_layers": 3, "num_labels": 5})
    assert len(changed.layer_types) == 3 and changed.num_labels == 5 and config.num_hidden_layers == 2
    for field, value, message in (("layers", 1, "no such field"), ("state_size", "x", "int"), ("state_size", 0, "=0")):
        with pytest.raises(ValueError, match=message):
            with_fields(config, {field: value})
    check_fields(LonghornConfig, ["rope_theta", "num_labels", "hidden_size"])


def test_nothing_is_executed_for_a_configuration(tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n", encoding="utf-8")
    for saved in ('{"auto_map": {"AutoConfig": "mine.Config"}}', '{"model_type": ["longhorn"]}'):
        (tmp_path / "config.json").write_text(saved, encoding="utf-8")
        with pytest.raises(ValueError, match=r"config\.json has no model_type"):
            config_of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}')
    with pytest.raises(ValueError, match="model_type='mine' is not a family"):
        config_of_folder(tmp_path)
    assert not (tmp_path / "executed").exists()
