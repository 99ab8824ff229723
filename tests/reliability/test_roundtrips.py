"""Saving and loading lose no bit; `python -m tests.reliability.roundtrips` goes through every class and variant."""

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.models.spade.modeling_spade import SpadePreTrainedModel
from tests.reliability.population import FEW, build, class_with_loss, classes_of
from tests.reliability.roundtrips import (
    WAYS,
    cast_differences,
    differences,
    exchanges,
    kept_in_float32,
    outputs_differ,
    recurrence_names,
    tensors_of,
    ties_of,
    trips,
)

HEADED = [
    (variant, name) for variant in FEW for name in classes_of(variant) if "ForCausal" in name or "ForCond" in name
]
EVERY_CLASS = [(variant, name) for variant in FEW for name in classes_of(variant)]


def faults_of(reports):
    reports = list(reports)
    assert reports
    return [(kind, fault) for kind, _, _, found in reports for fault in found]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("variant", "class_name"), HEADED)
def test_saved_in_shards_and_loaded_in_bfloat16(variant, class_name, way):
    assert faults_of(trips(variant, class_name, (torch.bfloat16,), [way], ["sharded"])) == []


@pytest.mark.parametrize(("variant", "class_name"), EVERY_CLASS)
def test_saved_in_one_file_and_loaded_in_float16(variant, class_name):
    assert faults_of(trips(variant, class_name, (torch.float16,), ["`from_pretrained`"], ["one file"])) == []


@pytest.mark.parametrize(("variant", "class_name"), HEADED)
def test_saved_in_one_file_and_loaded_in_float32(variant, class_name):
    assert faults_of(trips(variant, class_name, (torch.float32,), ["`from_pretrained`"], ["one file"])) == []


@pytest.mark.parametrize(("variant", "class_name"), EVERY_CLASS)
def test_loaded_into_the_other_classes_of_the_family(variant, class_name):
    assert faults_of(exchanges(variant, class_name, torch.bfloat16)) == []


@pytest.mark.parametrize("variant", ["spade batchnorm", "bst block-recurrent", "spade ema", "bst s5 bidirectional"])
def test_loaded_with_what_few_variants_have(variant):
    """Running statistics, recurrent states, exponential averages, two directions."""
    for class_name in classes_of(variant):
        assert faults_of(trips(variant, class_name, (torch.bfloat16,), ["`from_pretrained`"], ["one file"])) == []


def test_the_population_has_what_is_looked_for():
    """Or the checks above would have nothing to find."""
    longhorn = build("longhorn", "LonghornForCausalLM")
    assert ties_of(longhorn) == {frozenset({"lm_head.weight", "model.embed_tokens.weight"})}
    assert ties_of(build("longhorn untied", "LonghornForCausalLM")) == set()
    assert any(name.endswith("dt_bias") for name in kept_in_float32(longhorn))
    spade = build("spade s4 trained", "SpadeForCausalLM")
    assert {name.rpartition(".")[2] for name in kept_in_float32(spade)} >= set(S4.float32_parameters)
    assert recurrence_names(spade) >= kept_in_float32(spade)
    assert any(hasattr(parameter, "_optim") for parameter in spade.parameters())


def spoil_bit(model):
    next(parameter for name, parameter in model.named_parameters() if name.endswith("log_dt")).data.view(-1)[0] *= (
        1 + 2**-23
    )


def spoil_dtype(model):
    model.model.layers[0].to(torch.float16)


def spoil_tie(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def spoil_training(model):
    next(model.parameters()).requires_grad_(False)


def spoil_marks(model):
    for parameter in model.parameters():
        parameter.__dict__.pop("_optim", None)


@pytest.mark.parametrize("spoil", [spoil_bit, spoil_dtype, spoil_tie, spoil_training, spoil_marks])
def test_a_difference_is_found(spoil):
    before, after = (build("spade s4 trained", "SpadeForCausalLM") for _ in range(2))
    assert list(differences(before, after)) == []
    spoil(after)
    assert list(differences(before, after))


@pytest.mark.parametrize("variant", ["longhorn + window and full attention", "spade s4 trained"])
def test_float32_parameters_stay_so_when_a_model_is_cast_in_place(variant):
    """As through a file; a rounded one is found."""
    name = class_with_loss(variant)
    before, after = build(variant, name), build(variant, name).to(torch.bfloat16)
    assert list(cast_differences(before, after, torch.bfloat16)) == []
    kept = kept_in_float32(after)
    for tensor in after.parameters():
        tensor.data = tensor.data.to(torch.bfloat16).to(tensor.dtype)
    faults = list(cast_differences(before, after, torch.bfloat16))
    assert kept and {fault.split()[0] for fault in faults} == kept
    assert "itself" in faults[0]


def test_rotary_frequencies_stay_exact_when_a_model_is_cast_in_place():
    """No file holds them, hence a reloaded model would have other ones."""
    model = build("longhorn + window and full attention", "LonghornModel")
    frequencies = model.rotary_emb.inv_freq.clone()
    assert not torch.equal(frequencies.to(torch.bfloat16).to(torch.float32), frequencies)
    assert torch.equal(model.half().rotary_emb.inv_freq, frequencies)
    assert model.double().rotary_emb.inv_freq.dtype == torch.float64


def test_parameters_drawn_anew_behind_a_load_are_found(monkeypatch):
    """The fault that transformers' own `init` functions guard against: in-place writes that know no checkpoint."""
    original = SpadePreTrainedModel._init_weights

    def careless(self, module):
        original(self, module)
        if isinstance(module, S4):
            module.reset_parameters()

    def initialises_loaded_modules(self, *args, **kwargs):
        for module in self.modules():
            self._init_weights(module)

    monkeypatch.setattr(SpadePreTrainedModel, "_init_weights", careless)
    monkeypatch.setattr(SpadePreTrainedModel, "initialize_weights", initialises_loaded_modules)
    faults = faults_of(
        trips("spade s4 trained", "SpadeForCausalLM", (torch.float32,), ["`from_pretrained`"], ["one file"])
    )
    assert any(".ssm." in fault or "log_dt" in fault for _, fault in faults)


def test_a_remembered_filter_is_found():
    """Outputs are compared too: a stale kernel is in no parameter and no buffer."""
    before, after = (build("spade s4 window", "SpadeForCausalLM") for _ in range(2))
    assert not outputs_differ(before, after)
    mixer = next(module for module in after.modules() if isinstance(module, S4))
    tensors = {key: value.clone() for key, value in tensors_of(after).items()}
    with torch.no_grad():
        mixer.C.mul_(2)
        after(input_ids=torch.tensor([[3, 4, 5]]))  # remembers the filter of the doubled C
        remembered = dict(mixer._kernel_cache)
        after.load_state_dict(tensors, strict=False)
    mixer._clear_if_changed()
    mixer._kernel_cache.update(remembered)
    assert list(differences(before, after)) == [] and outputs_differ(before, after)
