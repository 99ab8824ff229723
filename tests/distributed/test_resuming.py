"""Checkpoints in shards fit another number of processes; activation checkpointing changes nothing in copies."""

from pathlib import Path

import pytest
import torch

from tests.distributed.launching import in_two_processes
from tests.distributed.resuming_worker import (
    DROPOUTS,
    HALF,
    STEPS,
    model_of,
    optimizer_of,
    resume,
    save,
    spoilt,
    train,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process trains all steps and saves half-way; two processes do what `resuming_worker` says."""
    folder = tmp_path_factory.mktemp("resuming")
    alone = {}
    for case in DROPOUTS:
        model = model_of(case)
        optimizer = optimizer_of(model)
        losses = train(model, optimizer, 0, HALF)
        save(model, optimizer, folder / "one" / case)
        losses += train(model, optimizer, HALF, STEPS)
        alone[case] = losses, {name: value.detach().clone() for name, value in model.state_dict().items()}
    in_two_processes(Path(__file__).with_name("resuming_worker.py"), folder)
    return folder, alone, torch.load(folder / "found.pt")


def assert_same(found, losses, weights):
    assert found[0] == pytest.approx(losses, rel=1e-5)
    assert found[1].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("case", DROPOUTS)
def test_from_two_processes_to_one(runs, case):
    folder, alone, found = runs
    losses, weights = alone[case]
    assert found[case]["first half, two processes"] == pytest.approx(losses[:HALF], rel=1e-5)
    model = spoilt(model_of(case))
    optimizer = optimizer_of(model)
    resume(model, optimizer, folder / "two" / case)
    again = train(model, optimizer, HALF, STEPS)
    assert_same((again, dict(model.state_dict())), losses[HALF:], weights)
    assert losses[0] != losses[-1]


@pytest.mark.parametrize("case", DROPOUTS)
def test_from_one_process_to_two(runs, case):
    _, alone, found = runs
    losses, weights = alone[case]
    assert_same(found[case]["second half, from one to two processes"], losses[HALF:], weights)


@pytest.mark.parametrize("case", DROPOUTS)
def test_activation_checkpointing_in_copies(runs, case):
    _, alone, found = runs
    assert_same(found[case]["checkpointing, two processes"], *alone[case])
