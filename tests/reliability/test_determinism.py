"""The same seed, the same bits; `python -m tests.reliability.determinism` goes through every variant."""

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.state_space import StateSpaceMixer
from tests.reliability.bits import digest, same_bits
from tests.reliability.determinism import (
    different_forwards,
    different_samples,
    gradients,
    sample,
    train,
    train_elsewhere,
)
from tests.reliability.population import FEW, build, class_with_loss

TRAINED = ["longhorn + window and full attention", "bst mh s4"]


@pytest.mark.parametrize("variant", TRAINED)
def test_training_does_not_depend_on_the_number_of_loading_workers(variant):
    first = train(variant)
    assert train(variant, workers=1) == first
    assert train(variant, workers=2) == first
    assert train(variant, seed=4) != first


@pytest.mark.parametrize("variant", ["lmu-isa", "spade s4 trained", "encoder-decoder"])
def test_training_repeats(variant):
    assert train(variant) == train(variant)


def test_training_repeats_in_another_process():
    assert train_elsewhere(TRAINED[:1], hash_seed=1) == {TRAINED[0]: train(TRAINED[0])}


@pytest.mark.parametrize("variant", TRAINED)
def test_threads_do_not_change_the_order_of_sums(variant):
    assert len(set(gradients(variant, repetitions=3, threads=4))) == 1


def test_gradients_that_differ_are_found(monkeypatch):
    """By dropout from no seed."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    assert len(set(gradients("bst mh s4", repetitions=3, threads=4))) == 3


@pytest.mark.parametrize("variant", FEW)
def test_forward_and_sampling_repeat(variant):
    model = build(variant, class_with_loss(variant))
    assert different_forwards(model) == []
    assert different_samples(model) == []
    assert not torch.equal(sample(model, 1), sample(model, 2))


def test_bits_tell_apart_what_is_equal():
    zero = torch.zeros(3)
    assert same_bits(zero, zero.clone()) and torch.equal(zero, -zero) and not same_bits(zero, -zero)
    assert not same_bits(zero, zero.half()) and not same_bits(zero, zero.to("meta"))
    assert same_bits(zero / 0, zero / 0)
    assert digest({"a": zero}) != digest({"a": -zero}) != digest({"b": -zero})


def test_a_filter_that_depends_on_the_length_before_is_found(monkeypatch):
    original = StateSpaceMixer.kernel

    def forgetful(self, length, dtype=torch.float32, direction=0):
        self.longest = max(getattr(self, "longest", 0), length)
        return original(self, length, dtype, direction) * (1 + self.longest * 1e-5)

    monkeypatch.setattr(StateSpaceMixer, "kernel", forgetful)
    assert different_forwards(build("spade s4 window", "SpadeForCausalLM")) == [("without", 70)]
