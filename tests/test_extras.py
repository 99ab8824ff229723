"""What is missing for what one wants to do: by the package's own metadata, as a command that works anywhere."""

import importlib.metadata
import json
import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_hybrid_ssm import doctor, extras
from hf_hybrid_ssm.extras import install_command, missing_modules, missing_requirements, requirements_of
from hf_hybrid_ssm.ops.core import native_build

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
LINES = [
    "torch>=2.6",
    "datasets>=3.0; extra == 'train'",
    "lm-eval>=0.4.9; extra == 'eval'",
    "pyyaml; extra == 'train'",
]
LINES += ["only-elsewhere>=1; sys_platform == 'nowhere' and extra == 'train'"]


@pytest.fixture
def nothing_installed(monkeypatch):
    """But the package itself."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: LINES)
    monkeypatch.setattr(importlib.metadata, "version", version)


def test_from_the_metadata(nothing_installed):
    assert requirements_of("train") == ["datasets>=3.0", "pyyaml"]
    assert install_command("train", "eval") == "pip install 'datasets>=3.0' 'pyyaml' 'lm-eval>=0.4.9'"
    assert missing_modules("train", "eval") == {"datasets", "yaml", "lm_eval"}
    with pytest.raises(ValueError, match="extra='trian' is not one of 'eval', 'train'"):
        requirements_of("trian")


def test_what_is_there_is_not_asked_for(nothing_installed, monkeypatch):
    there = {"datasets": "2.9", "pyyaml": "6.0", "lm-eval": "0.5.0rc1"}
    monkeypatch.setattr(importlib.metadata, "version", there.__getitem__)
    assert missing_requirements("train", "eval") == ["datasets>=3.0"]  # which is too old
    there["datasets"] = "3.1"
    assert missing_requirements("train", "eval") == []
    assert install_command("train") == "pip install 'datasets>=3.0' 'pyyaml'"


def test_of_sources_that_were_not_installed(monkeypatch):
    """From a clone's pyproject.toml; every line of it is one that pip reads."""
    installed = {extra: requirements_of(extra) for extra in ("train", "eval", "sft", "dev")}

    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    for extra, lines in installed.items():
        assert {Requirement(line) for line in requirements_of(extra)} == {Requirement(line) for line in lines}
    for line in shlex.split(install_command("train", "sft"))[2:]:
        Requirement(line)
    monkeypatch.setattr(extras, "PROJECT", Path("/nowhere"))
    with pytest.raises(ValueError, match="not one of"):
        requirements_of("train")


def test_the_doctor_says_what_to_type(nothing_installed, monkeypatch):
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: [*LINES, "trl; extra == 'sft'", "x; extra=='gpu'"]
    )
    monkeypatch.setattr(doctor, "PURPOSES", {"train": ("hf-hybrid-ssm", "train"), "talk": ("hf-hybrid-ssm", "sft")})
    monkeypatch.setattr(native_build, "_compiler", lambda: None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    found = doctor.purposes(has_gpu=True)
    assert found["train"] == "pip install 'datasets>=3.0' 'pyyaml'" and found["talk"] == "pip install 'trl'"
    assert "apt-get install gcc" in found[doctor.KERNELS_ON_CPU]
    assert found[doctor.KERNELS_ON_GPU] == "pip install 'x'"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9")
    monkeypatch.setattr(native_build, "_compiler", lambda: ("/usr/bin/cc",))
    assert set(doctor.purposes(has_gpu=True).values()) == {None}


def test_the_doctor_leaves_out_what_it_cannot_know(monkeypatch):
    """An older transformers has no extra for its server, and sources may lie anywhere without metadata."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [])
    found = doctor.purposes(has_gpu=True)
    assert doctor.KERNELS_ON_GPU not in found and not found.keys() & doctor.PURPOSES.keys()


def test_the_doctor_says_a_reason_for_every_op_once():
    missing, found = (
        "No module named 'triton'",
        {"packages": {}, "python": "3", "sources": None, "cpu_kernels": "compiled by cc", "purposes": {}}
        | {"threads": {"torch": 1, "processors": 2, "quota": 1.5, "wait_policy": None}},
    )
    states = {"torch": "runs", "triton": missing, "native": "it runs on the CPU"}
    ops = {
        name: {"cpu float32": {"selected": "torch", "backends": dict(states), "kernel_errors": {}}}
        for name in ("one", "two")
    }
    ops["two"]["cpu float32"]["backends"]["native"] = "runs"
    assert doctor.reasons_everywhere(ops) == {"triton": missing}
    shown = doctor.report(found | {"ops": ops})
    assert "threads: 1 on 2 processors, of which the container may use 1.5; OMP_WAIT_POLICY is not set" in shown
    assert shown.count(missing) == 1 and shown.count("not native: it runs on the CPU") == 1


def test_what_a_compiler_gives_is_what_was_measured():
    measured = json.loads((RESULTS / "longhorn_training.json").read_text())["training_step"]
    factor = measured["tokens_per_second"]["longhorn native"] / measured["tokens_per_second"]["longhorn torch"]
    assert f"{factor:.1f} times as fast" in native_build.NO_COMPILER
