"""Models that are compared are of one size, or it is said that they are not."""

import pytest
import yaml
from _lib.checks import difference_in_size, size_of
from compare import CompareArguments, planned_size
from mqar import MqarArguments, fields_of
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hybrid_ssm.hub.configurations import new_config
from tests.test_documentation import ROOT


@pytest.mark.parametrize("tied", [False, True])
def test_tables_of_the_vocabulary_do_not_count(tied):
    config = LlamaConfig(
        vocab_size=1000, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    whole = sum(weight.numel() for weight in LlamaForCausalLM(config).parameters())
    assert size_of(config) == whole - (1 if tied else 2) * 16_000 == 4 * 256 + 3 * 128 + 3 * 16


def test_a_difference_is_one_line():
    assert difference_in_size({"a": 100, "b": 150}) is None
    said = difference_in_size({"a": 100, "b": 151, "c": 120})
    assert "b has 151 parameters" in said and "1.5 times those of a (100)" in said and "\n" not in said


def test_fields_that_grow_with_the_width():
    given = {"model_type": "llama", "torch_compile": True, "times_width": {"intermediate_size": 1.25}}
    assert fields_of(given, 64, 100) == ("llama", {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 80})


@pytest.mark.parametrize("name", ["paper", "families_cpu"])
def test_the_sweeps_of_recall_compare_models_of_one_size(name):
    given = yaml.safe_load((ROOT / f"recipes/configs/mqar/{name}.yaml").read_text())
    known = MqarArguments.__dataclass_fields__
    arguments = MqarArguments(**{key: value for key, value in given.items() if key in known})
    for width in arguments.widths:
        made = {each: fields_of(fields, width, arguments.vocab_size) for each, fields in arguments.models.items()}
        sizes = {each: size_of(new_config(family, **fields)) for each, (family, fields) in made.items()}
        assert difference_in_size(sizes) is None, (width, sizes)


def test_the_sizes_of_a_comparison():
    small = {"model_type": "longhorn", "config": {"hidden_size": 16, "num_hidden_layers": 1}}
    arguments = CompareArguments(base={}, variants={"a": small, "b": small | {"preset": "125m", "config": {}}})
    sizes = {name: planned_size(settings) for name, settings in arguments.variants.items()}
    assert sizes["b"] > 50_000_000 and "b has" in difference_in_size(sizes)
