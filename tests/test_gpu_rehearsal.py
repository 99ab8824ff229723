"""What `make gpu` does on a card, rehearsed on a CPU: every part runs, is recorded, and goes on after a kill."""

import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from benchmarks.gpu import child, requirements
from benchmarks.gpu.__main__ import arguments_of
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import Store

ROOT = Path(__file__).parents[1]


def rehearse(folder, *arguments):
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--rehearse", "--results", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["src", *paths()])}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def paths():
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


@pytest.mark.timeout(900)
def test_every_part(tmp_path):
    """The parts run one after the other in one process; a second run finds everything done."""
    said = rehearse(tmp_path)
    assert " 0 failed; " in said
    for part in child.PARTS:
        found = json.loads((tmp_path / f"gpu_{part}.json").read_text())
        assert found["cases"] and found["identity"] == {"device": "cpu", "rehearsal": True}
    page = (tmp_path / "reports" / "gpu.md").read_text()
    assert "nothing here is a measurement" in page
    assert all(f"| {part.replace('_', ' ')} |" in page for part in child.PARTS)
    before = (tmp_path / "gpu_training.json").read_bytes()
    assert " 0 failed; " in rehearse(tmp_path)
    assert (tmp_path / "gpu_training.json").read_bytes() == before


def test_the_report_is_of_a_card():
    page = ROOT / "reports" / "gpu.md"
    assert not page.exists() or "nothing here is a measurement" not in page.read_text(encoding="utf-8")


@pytest.fixture
def part(monkeypatch):
    """A part with a case that fails between two that do not, and a log of what ran."""
    ran = []

    def case(name, result):
        def run():
            ran.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return name, run

    module = types.ModuleType("benchmarks.gpu.peaks")
    results = {"first": {"ms": 1}, "broken": ValueError("too\nbad"), "last": {"ms": 3}}
    module.cases = lambda settings: [case(name, result) for name, result in results.items()]
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.peaks", module)
    return ran, results


def run(store, until=None):
    return child.run_cases(Settings("cpu", True), store, ["peaks"], until or time.time() + 60)


def test_a_failed_case_is_recorded_and_the_others_run(part, tmp_path):
    ran, _ = part
    store = Store(tmp_path, {"device": "cpu"})
    assert run(store) == child.DONE
    assert ran == ["first", "broken", "last"]
    cases = store.cases("peaks")
    assert cases["broken"]["error"] == "ValueError: too" and cases["last"]["ms"] == 3
    assert run(store) == child.DONE and len(ran) == 3


def test_a_killed_case_is_recorded_and_not_run_again(part, tmp_path):
    ran, _ = part
    store = Store(tmp_path, {"device": "cpu"})
    store.begin("peaks", "first")
    assert store.record_killed("its process ended with status -9") == "peaks: first"
    assert store.record_killed("again") is None
    assert run(store) == child.DONE and ran == ["broken", "last"]
    assert store.cases("peaks")["first"] == {"error": "its process ended with status -9", "killed": True}


def test_a_poisoned_gpu_ends_the_process(part, tmp_path):
    ran, results = part
    results["broken"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    store = Store(tmp_path, {"device": "cpu"})
    assert run(store) == child.FATAL
    assert run(store) == child.DONE and ran == ["first", "broken", "last"]


def test_no_case_begins_after_the_end_of_a_slice(part, tmp_path):
    ran, _ = part
    assert run(Store(tmp_path, {"device": "cpu"}), until=time.time() - 1) == child.OUT_OF_TIME
    assert ran == []


def test_no_case_begins_after_the_command_was_killed(part, tmp_path, monkeypatch):
    ran, _ = part
    parents = iter([1, 1, 2])
    monkeypatch.setattr(child.os, "getppid", lambda: next(parents))
    assert run(Store(tmp_path, {"device": "cpu"})) == child.OUT_OF_TIME
    assert ran == ["first"]


def test_results_of_another_card_are_not_taken(part, tmp_path):
    ran, _ = part
    run(Store(tmp_path, {"device": "one"}))
    run(Store(tmp_path, {"device": "other"}))
    assert len(ran) == 6


def test_everything_that_is_missing_is_named_at_once(monkeypatch):
    versions = {"torch": "2.7.1+cu128", "transformers": "5.17.0", "safetensors": "0.5"}

    def version(name):
        if name not in versions:
            raise requirements.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(requirements, "version", version)
    assert requirements.problems("cuda") == [
        "torch 2.7.1+cu128 is too old: pip install 'torch>=2.8'",
        "transformers 5.17.0 is too old: pip install 'transformers>=5.21'",
        "accelerate >= 1.3 is missing: pip install 'accelerate>=1.3'",
        "triton >= 3.3 is missing: pip install 'triton>=3.3'",
    ]


def test_a_cpu_only_rehearses(capsys):
    with pytest.raises(SystemExit):
        arguments_of(["--device", "cpu"])
    assert "needs --rehearse" in capsys.readouterr().err
