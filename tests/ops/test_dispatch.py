"""The choice of a backend: preference, force, and reasons."""

import logging
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from hf_hybrid_ssm.ops.dispatch import REGISTRY, Op, backend


@pytest.fixture
def op(monkeypatch):
    module = ModuleType("fast_on_cpu")
    module.run = lambda x: ("native", x)
    module.supports = lambda device_type, dtype: None if device_type == "cpu" else f"it runs on cpu, not {device_type}"
    monkeypatch.setitem(sys.modules, "fast_on_cpu", module)
    plain = {"torch": lambda x: ("torch", x), "reference": lambda x: ("reference", x)}
    yield Op("naming", plain, {"native": "fast_on_cpu", "triton": "no_such_package_at_all"})
    REGISTRY.pop("naming", None)


def chosen(op, device_type="cpu", requested=None):
    return op.select(device_type, torch.float32, requested)(None)[0]


def test_prefers_the_fastest_that_can_run(op):
    assert chosen(op) == "native"
    assert chosen(op, "meta") == "torch"


def test_force_by_argument_and_context(op):
    assert chosen(op, requested="reference") == "reference"
    with backend("reference"):
        assert chosen(op) == "reference"
        with backend("torch"):
            assert chosen(op) == "torch"
        assert chosen(op) == "reference"
        assert chosen(op, requested="native") == "native"
    assert chosen(op) == "native"


def fresh(value):
    code = "from hf_hybrid_ssm.ops import dispatch; print(dispatch._forced)"
    environment = {**os.environ, "HF_HYBRID_SSM_BACKEND": value, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_force_by_environment():
    assert fresh("reference").stdout.strip() == "reference"
    assert fresh("").stdout.strip() == "None"
    assert "HF_HYBRID_SSM_BACKEND='quick' is not a backend" in fresh("quick").stderr


def test_a_forced_backend_that_cannot_run_says_why(op):
    with pytest.raises(ValueError, match="runs on cpu, not cuda"):
        chosen(op, "cuda", "native")
    with pytest.raises(ValueError, match="no_such_package_at_all"):
        chosen(op, requested="triton")


def test_unknown_names(op):
    with pytest.raises(ValueError, match=r"backend='cuda'.*triton"):
        chosen(op, requested="cuda")
    with pytest.raises(ValueError, match="fastest"), backend("fastest"):
        pass


def test_the_context_ends_with_an_error(op):
    with pytest.raises(RuntimeError), backend("reference"):
        raise RuntimeError
    assert chosen(op) == "native"


def test_a_broken_package_costs_time_only(monkeypatch, tmp_path, caplog):
    (tmp_path / "broken_kernels.py").write_text("raise OSError('no driver')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    op = Op("breaking", {"torch": lambda x: ("torch", x), "reference": None}, {"native": "broken_kernels"})
    with caplog.at_level(logging.WARNING):
        assert chosen(op) == chosen(op) == "torch"
    assert len([record for record in caplog.records if "no driver" in record.getMessage()]) == 1
    REGISTRY.pop("breaking")
