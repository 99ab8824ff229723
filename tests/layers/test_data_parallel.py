"""Replicas as `nn.DataParallel` makes them: modules without parameters that compute with copies of them."""

import importlib

import pytest
import torch

from tests.tiny_models import CASES, VOCABULARY, built


@pytest.fixture
def replicas(monkeypatch):
    """torch's `replicate`, with copies on this device in place of a broadcast to several GPUs."""

    def broadcast(tensors, devices, detach=False):
        return [
            [t.clone() if t.requires_grad and not detach else t.detach().clone() for t in tensors] for _ in devices
        ]

    replication = importlib.import_module("torch.nn.parallel.replicate")  # the function hides the module
    monkeypatch.setattr(replication, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(replication, "_get_device_index", lambda device, optional: device)
    monkeypatch.setattr(replication.comm, "broadcast_coalesced", broadcast)  # of the buffers
    return lambda model, detach=False: replication.replicate(model, [0, 1], detach)


@pytest.mark.parametrize("case", CASES)
def test_replicas_compute_and_train(case, replicas):
    model = built(case).eval()  # no dropout
    ids = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(2, dtype=torch.int64) if "classifier" in case else ids
    model(input_ids=ids, labels=labels).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    first, second = replicas(model)
    halves = [part(input_ids=ids, labels=labels).loss for part in (first, second)]
    (sum(halves) / 2).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_replicas_remember_for_themselves(replicas):
    """What the original remembers lies on its device."""
    model = built("spade").eval()
    ids = torch.randint(3, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        remembering = [module for module in model.modules() if getattr(module, "_kernel_cache", None)]
        assert remembering
        for module in remembering:
            module._kernel_cache = dict.fromkeys(module._kernel_cache)  # unusable
        for replica in replicas(model, detach=True):
            torch.testing.assert_close(replica(ids).logits, expected, rtol=1e-5, atol=1e-5)
