"""A small share of the fuzzing, with seeds of its own; and that it would find what it looks for."""

import pickle
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import DynamicCache

from hf_hybrid_ssm import SpadeForConditionalGeneration
from hf_hybrid_ssm.models.configuration import HybridConfigMixin
from tests.reliability.fuzz import fuzz_configurations, fuzz_files
from tests.reliability.fuzzing.configurations import legal_case, refusal
from tests.reliability.fuzzing.drawing import FAMILIES, legal
from tests.reliability.fuzzing.files import DAMAGES, Payload, _refused, unfaithful
from tests.reliability.population import build, config_of

pytestmark = pytest.mark.filterwarnings("ignore")


def test_configurations_live_or_are_refused_by_name():
    lived, crossed, refused, faults = fuzz_configurations(20, seed=101)
    assert faults == []
    assert lived.total() == crossed.total() == refused.total() == 20


def test_damaged_folders_are_refused_or_load_as_they_say():
    outcomes, faults = fuzz_files(60, seed=102)
    assert faults == []
    assert {damage for damage, _ in outcomes} == {name for name, *_ in DAMAGES}
    assert {outcome for _, outcome in outcomes} >= {"refused", "loaded as its files say"}


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 3), (3, 1)])
def test_a_decoder_of_another_depth_than_its_encoder_generates(encoder, decoder):
    """Found by fuzzing: the cache had as many layers as the encoder."""
    config = config_of("encoder-decoder", num_hidden_layers=encoder, num_decoder_layers=decoder)
    assert len(DynamicCache(config=config).layers) == decoder
    model = SpadeForConditionalGeneration(config).eval()
    assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 4)


def test_a_check_that_is_gone_is_found(monkeypatch):
    monkeypatch.setattr(HybridConfigMixin, "check_dropout", lambda self, *names: None)
    fields = legal("bst", Random(0)) | {"bidirectional": False, "attention_dropout": float("nan")}
    assert "passes silently" in refusal("bst", fields, "attention_dropout", Random(0))


def test_a_refusal_that_names_another_field_is_found():
    fields = legal("lmu_isa", Random(0)) | {"lmu_order": 0}
    assert refusal("lmu_isa", fields, "lmu_order", Random(0)) is None
    assert "lmu_order=0 must be positive" in refusal("lmu_isa", fields, "hidden_size", Random(0))


def test_a_life_that_goes_wrong_is_found(monkeypatch, tmp_path):
    monkeypatch.setitem(FAMILIES, "lmu_isa", lambda random: {"hidden_size": 0})
    assert "hidden_size=0" in legal_case("lmu_isa", "any", tmp_path)[1]


def test_a_tensor_unlike_its_file_is_found():
    model = build("lmu-isa", "LmuIsaForCausalLM")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told: dict[str, list] = {"missing_keys": [], "unexpected_keys": []}
    assert unfaithful(model, told, tensors) is None
    name = "model.norm.weight"
    gone = {key: value for key, value in tensors.items() if key != name}
    assert "is in no file" in unfaithful(model, told, gone)
    assert unfaithful(model, told | {"missing_keys": [name]}, gone) is None
    assert "were left out" in unfaithful(model, told, tensors | {"more": torch.zeros(1)})
    tensors[name] += 1
    assert f"{name} differs" in unfaithful(model, told, tensors)


def test_the_payload_would_be_executed_by_an_unsafe_load(tmp_path: Path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_an_unclear_exception_of_this_package_is_a_fault():
    with pytest.raises(AttributeError) as raised:
        HybridConfigMixin.check_positive(object(), "size")  # type: ignore[arg-type]
    assert "AttributeError from this package" in _refused(raised.value)[1]
