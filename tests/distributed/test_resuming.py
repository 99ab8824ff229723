"""Checkpoints in shards fit another number of processes; activation checkpointing changes nothing in copies."""

import pytest
import torch

from tests.distributed.resuming import DROPOUTS, HALF, STEPS, model_of, optimizer_of, resume, spoilt, train


@pytest.fixture(scope="module")
def runs(two_processes):
    """What one process found alone, and two together."""
    return torch.load(two_processes / "alone.pt"), torch.load(two_processes / "together.pt")


def assert_same(found, losses, weights):
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("case", DROPOUTS)
def test_from_two_processes_to_one(two_processes, runs, case):
    alone, found = runs
    losses, weights = alone[case]
    assert found[case]["first half, two processes"] == pytest.approx(losses[:HALF], rel=1e-5)
    model = spoilt(model_of(case))
    optimizer = optimizer_of(model)
    resume(model, optimizer, two_processes / "two" / case)
    again = train(model, optimizer, HALF, STEPS)
    assert_same((again, dict(model.state_dict())), losses[HALF:], weights)
    assert losses[0] != losses[-1]


@pytest.mark.parametrize("case", DROPOUTS)
def test_from_one_process_to_two(runs, case):
    alone, found = runs
    losses, weights = alone[case]
    assert_same(found[case]["second half, from one to two processes"], losses[HALF:], weights)


@pytest.mark.parametrize("case", DROPOUTS)
def test_activation_checkpointing_in_copies(runs, case):
    alone, found = runs
    assert_same(found[case]["checkpointing, two processes"], *alone[case])
