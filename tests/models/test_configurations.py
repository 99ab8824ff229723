"""Derived fields of every family follow what they are computed from, until someone sets them."""

import copy
import json
import logging
import sys
from dataclasses import fields as fields_of
from pickle import dumps, loads

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hf_hybrid_ssm import BstConfig, LmuIsaConfig, LonghornConfig, SpadeConfig, SpadeSeq2SeqConfig
from hf_hybrid_ssm.layers.mixers import registry
from hf_hybrid_ssm.layers.mixers.types import MixerType
from tests import processes
from tests.tiny_models import EVERY, config_of

CLASSES = (LonghornConfig, BstConfig, LmuIsaConfig, SpadeConfig, SpadeSeq2SeqConfig)
# family, a change, and the derived fields after it
CHANGES = [
    (LonghornConfig, {"num_hidden_layers": 2}, {"layer_types": ["longhorn"] * 2}),
    (LonghornConfig, {"num_hidden_layers": 30}, {"layer_types": ["longhorn"] * 30}),
    (
        LonghornConfig,
        {"hidden_size": 128},
        {"time_step_rank": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    ),
    (LonghornConfig, {"num_attention_heads": 4}, {"num_key_value_heads": 4, "head_dim": 192}),
    (LonghornConfig, {"layer_types": ["full_attention"] * 24}, {"max_position_embeddings": 2048}),
    (LonghornConfig, {"vocab_size": 100}, {"bos_token_id": None, "eos_token_id": None}),
    (LmuIsaConfig, {"vocab_size": 100}, {"bos_token_id": None, "eos_token_id": None}),
    (LmuIsaConfig, {"lmu_order": 100}, {"lmu_reduced_order": 10}),
    (LmuIsaConfig, {"hidden_size": 33}, {"pre_intermediate_size": 50}),
    (BstConfig, {"num_hidden_layers": 2}, {"layer_types": ["bst", "window_attention"], "ssm_layers": [0]}),
    (BstConfig, {"ssm_layers": [1]}, {"layer_types": ["window_attention", "bst"] + ["window_attention"] * 10}),
    (BstConfig, {"layer_types": ["bst"] * 12}, {"ssm_layers": list(range(12))}),
    (BstConfig, {"ssm_type": "s5", "hidden_size": 64}, {"ssm_state_size": 256, "logit_scale": 0.125}),
    (SpadeConfig, {"ssm_type": "s5"}, {"ssm_state_size": 256, "ssm_trainable": "all"}),
    (SpadeConfig, {"ssm_type": "lstm"}, {"ssm_state_size": None, "ssm_trainable": "all"}),
    (SpadeConfig, {"norm_position": "post"}, {"final_norm": False, "embedding_norm": True}),
    (SpadeConfig, {"hidden_size": 64, "dropout": 0.3}, {"classifier_hidden_size": 64, "classifier_dropout": 0.3}),
    (SpadeSeq2SeqConfig, {"norm_position": "pre"}, {"final_norm": True, "embedding_norm": False}),
]
changes = pytest.mark.parametrize(
    ("kind", "fields", "wanted"), CHANGES, ids=[f"{kind.__name__}-{'-'.join(fields)}" for kind, fields, _ in CHANGES]
)


def saved(config, folder):
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@changes
def test_a_change_is_what_building_with_it_gives(kind, fields, wanted, tmp_path):
    built, changed = kind(**fields), kind()
    for name, value in fields.items():
        setattr(changed, name, value)
    assert {name: getattr(changed, name, None) for name in wanted} == wanted
    assert changed.to_dict() == built.to_dict()
    kind().save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path, **fields)  # a saved field still follows
    loaded.name_or_path = ""
    assert loaded.to_dict() == saved(built, tmp_path) | loaded.to_dict()
    assert {name: getattr(loaded, name, None) for name in wanted} == wanted


@changes
def test_a_file_is_complete_and_reloads(kind, fields, wanted, tmp_path):
    config = kind(**fields)
    written = saved(config, tmp_path)
    of_file = {"layer_types": "block_types"}
    for name in kind.derived:
        assert written.get(of_file.get(name, name)) == getattr(config, name, None)
    assert not any(name.startswith("_") for name in written)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert saved(loaded, tmp_path) == written
    for name in kind.derived:
        assert getattr(loaded, name, None) == getattr(config, name, None)


def test_what_someone_set_stays():
    config = LonghornConfig(head_dim=64)  # also what would be derived
    config.hidden_size = 1024
    config.num_attention_heads = 8
    assert (config.head_dim, config.num_key_value_heads) == (64, 8)
    config.num_key_value_heads = 2
    config.num_attention_heads = 16
    assert config.num_key_value_heads == 2
    config.num_key_value_heads = None  # as it was at first
    config.time_step_rank = "auto"
    assert (config.num_key_value_heads, config.time_step_rank) == (16, 64)
    config = LonghornConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="layer_types names 2 layers, but num_hidden_layers=3"):
        AutoModelForCausalLM.from_config(config)


def test_copies_are_apart():
    import copy

    config = LonghornConfig()
    for other in (copy.copy(config), copy.deepcopy(config)):
        other.head_dim = 32
        other.hidden_size = 512
        assert (other.head_dim, config.head_dim) == (32, 64)
        config.hidden_size = 1024
        assert config.head_dim == 64 and config.num_attention_heads == 16
        config.hidden_size = 768


def test_command_line_overrides():
    """What transformers' example scripts do with --config_overrides."""
    config = AutoConfig.for_model("longhorn")
    config.update_from_string("num_hidden_layers=2,hidden_size=64,vocab_size=100")
    model = AutoModelForCausalLM.from_config(config)
    assert (len(model.model.layers), config.time_step_rank, config.eos_token_id) == (2, 4, None)
    config.validate()


def test_the_file_of_an_older_save(tmp_path):
    """It names every field; values that are not the derived ones are kept."""
    fields = {
        "model_type": "longhorn", "transformers_version": "5.21.0", "hidden_size": 64, "num_hidden_layers": 2,
        "layer_types": ["longhorn", "full_attention"], "time_step_rank": 5, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 100, "bos_token_id": 50256, "eos_token_id": None,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path, hidden_size=128)
    assert config.layer_types == fields["layer_types"]
    assert (config.time_step_rank, config.num_attention_heads, config.head_dim) == (5, 2, 64)


@pytest.mark.parametrize("config_class", CLASSES)
def test_what_follows_from_fields_is_not_set(config_class, tmp_path):
    """Nor swallowed: its value is taken as said again, another one is refused by name."""
    config = config_class()
    config.save_pretrained(tmp_path)
    ours = [kind for kind in config_class.__mro__ if kind.__module__.startswith("hf_hybrid_ssm.")]
    names = {name for kind in ours for name, value in vars(kind).items() if isinstance(value, property)}
    assert ("intermediate_size" in names) == (config_class is LonghornConfig)
    assert ("layer_types" in names) == (config_class not in (LonghornConfig, BstConfig))
    for name in names:
        fields = {name: getattr(config, name)}
        assert config_class(**fields).to_dict() == config.to_dict(), name
        with pytest.raises(ValueError, match=f"{name}=7 cannot be set: it is no field of {config_class.__name__}"):
            config_class(**{name: 7})
        with pytest.raises(ValueError, match=f"{name}=7 cannot be set"):
            config_class.from_pretrained(tmp_path, **{name: 7})
        with pytest.raises(ValueError, match=f"{name}=7 cannot be set"):
            setattr(config, name, 7)


def test_the_width_of_a_block_names_what_to_set_instead():
    with pytest.raises(ValueError, match=r"intermediate_size=64 .*here 1536\..*`expand .*`mlp_intermediate_size`"):
        LonghornConfig(intermediate_size=64)


def test_rotary_positions_are_asked_for_where_there_are_some():
    assert LonghornConfig(hidden_size=33, num_hidden_layers=2).intermediate_size == 66
    with pytest.raises(ValueError, match="head_dim=33 must be even"):
        LonghornConfig(hidden_size=33, num_hidden_layers=1, layer_types=["full_attention"])


@pytest.mark.parametrize("variant", EVERY)
def test_a_length_is_named_where_rotary_positions_have_no_bound(variant):
    """What generation warns of and evaluation cuts prompts to; windows, states and T5's bias end nowhere."""
    config = config_of(variant)
    rotates = hasattr(config, "rope_parameters")
    unbounded = rotates and "full_attention" in config.layer_types
    for each in (config, type(config).from_dict(config.to_dict()), copy.deepcopy(config), loads(dumps(config))):
        assert hasattr(each, "max_position_embeddings") == ("max_position_embeddings" in each.to_dict()) == unbounded
        # which sentence-transformers compares with a number
        assert getattr(each, "max_position_embeddings", 2048) == 2048
        assert each.to_dict() == config.to_dict()
    assert config == config_of(variant) != config_of(variant, vocab_size=62)


def test_lengths_that_were_set_stay():
    assert LonghornConfig(max_position_embeddings=99).max_position_embeddings == 99
    hybrid = LonghornConfig(num_hidden_layers=2, layer_types=["full_attention", "longhorn"])
    assert hybrid.max_position_embeddings == 2048
    factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    for kind, more in (("llama3", factors), ("yarn", {})):  # rules that refer to the length
        rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 100.0, **more}
        windows = LonghornConfig(num_hidden_layers=1, layer_types=["window_attention"], rope_parameters=rope)
        assert windows.max_position_embeddings == 2048
        unused = LonghornConfig(rope_parameters=rope)  # of layers that do not rotate
        assert unused.max_position_embeddings == 2048
    with pytest.raises(ValueError, match="max_position_embeddings=0 must be positive"):
        LonghornConfig(max_position_embeddings=0)
    config = LonghornConfig(max_position_embeddings=7)
    config.max_position_embeddings = None
    with pytest.raises(AttributeError, match="LonghornConfig has no max_position_embeddings: nothing limits it"):
        _ = config.max_position_embeddings


def test_generation_beyond_two_thousand_tokens_warns_of_no_limit(caplog):
    for family in ("longhorn", "bst"):
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "vocab_size": 9}
        config = AutoConfig.for_model(family, eos_token_id=None, pad_token_id=0, **sizes)
        model = AutoModelForCausalLM.from_config(config).eval()
        transformers_logger = logging.getLogger("transformers")
        transformers_logger.addHandler(caplog.handler)
        try:
            model.generate(torch.ones(1, 4097, dtype=torch.long), max_new_tokens=2)
        finally:
            transformers_logger.removeHandler(caplog.handler)
        assert "performance degradation" not in caplog.text


def test_discretizations():
    assert BstConfig(ssm_type="s5", ssm_discretization="zoh").ssm_discretization == "zoh"
    assert BstConfig(ssm_type="s4", ssm_discretization="bilinear").ssm_discretization == "bilinear"


def test_configurations_load_no_layer_and_no_op():
    """Beyond those of our cache, which comes with the first configuration where transformers' caches are there."""
    names = ", ".join(kind.__name__ for kind in CLASSES)
    code = f"""
import sys, hf_hybrid_ssm.models.cache
before = set(sys.modules)
from hf_hybrid_ssm import {names}
for kind in ({names}):
    kind()
for mixer in {sorted(registry.BUILT_IN)}:
    SpadeConfig(ssm_type=mixer)
new = set(sys.modules) - before
print(*sorted(name for name in new if name.startswith(("hf_hybrid_ssm.layers", "hf_hybrid_ssm.ops"))))
"""
    found = processes.run([sys.executable, "-c", code], check=True, with_transformers=False).stdout.split()
    mixers = "hf_hybrid_ssm.layers.mixers"
    assert found == ["hf_hybrid_ssm.layers", mixers, f"{mixers}.types"]  # which import nothing but dataclasses


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_configurations_know_of_a_mixer_what_its_class_says(name):
    declared, mixer = registry.MIXER_TYPES[name], registry.MIXERS[name]
    assert isinstance(declared, MixerType)
    for field in fields_of(MixerType):
        assert getattr(declared, field.name) == getattr(mixer, field.name), field.name


@pytest.mark.parametrize("variant", EVERY)
def test_a_saved_configuration_is_read_by_transformers_base_class(variant, tmp_path):
    """As `Trainer` reads it to resume, and a tokenizer where this package is not installed."""
    config = config_of(variant)
    config.save_pretrained(tmp_path)
    PreTrainedConfig.from_json_file(tmp_path / "config.json")
    again = AutoConfig.from_pretrained(tmp_path)
    assert getattr(again, "layer_types", None) == getattr(config, "layer_types", None)
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()
