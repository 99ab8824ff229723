"""Ten targets that people use; every other name is a job of `tests.reporting`; pages name only what is there."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests import reporting

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
# as it stands in code spans, blocks of commands, workflows and scripts; prose that makes something is none of these
MAKE = re.compile(
    r"(?:`make ([a-z][a-z-]*)[` ]"  # in a span of code
    r"|^(?:[ -]*run:)?[ ]*make ([a-z][a-z-]*)(?=$|  |[ ]#| [A-Z_]+=| 2>))",  # a line of a script, block or workflow
    re.MULTILINE,
)
JOB = re.compile(r"-m tests\.reporting ([a-z][a-z-]*)")
# a page says which command made it at its commit; this file has names that must be refused
HISTORY = ("reports/", "tests/test_makefile.py")


def dry_run(*targets):
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST_ARGS"))}
    command = ["make", "--dry-run", "--no-print-directory", "VENV=nowhere/there", *targets]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True).stdout


def test_ten_targets_are_listed_and_have_a_rule():
    assert len(TARGETS) == 10
    assert re.findall(r"^#   make ([a-z]+)", MAKEFILE, re.MULTILINE) == TARGETS
    rules = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert rules == set(TARGETS)
    assert not rules & reporting.names().keys() - {"vllm"}  # whose environment only make can make


def test_any_other_name_is_a_job_that_says_its_command():
    names = sorted(reporting.names().keys() - set(TARGETS))
    lines = dry_run(*names).splitlines()
    for name in names:
        assert f'echo "make {name}: python -m tests.reporting {name}" >&2' in lines
        assert f"nowhere/there/bin/python -m tests.reporting {name} " in lines


def test_the_quick_tests_are_there():
    words = shlex.split(dry_run("quick").splitlines()[-1])
    paths = [word for word in words if word.startswith("tests/")]
    assert {"tests/ops", "tests/layers", "tests/models"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def tracked():
    """Text files of the repository, and where there is no git every page and script beside this one."""
    names = reporting.git("ls-files").splitlines()
    paths = [ROOT / name for name in names] or [path for path in ROOT.rglob("*") if path.suffix in (".md", ".py")]
    kinds = (".md", ".py", ".yml", ".toml", ".ipynb", ".sh")
    paths = [path for path in paths if path.suffix in kinds or path.parent.name == ".ci"]
    return [path for path in paths if path.is_file() and not str(path.relative_to(ROOT)).startswith(HISTORY)]


@pytest.mark.parametrize(
    "pattern, known", [(MAKE, set(TARGETS)), (JOB, set(reporting.names()))], ids=["make", "tests.reporting"]
)
def test_whatever_a_page_names_is_there(pattern, known):
    named = {}
    for path in tracked():
        for found in pattern.finditer(path.read_text(encoding="utf-8")):
            named.setdefault(found[found.lastindex], str(path.relative_to(ROOT)))
    assert len(named) > 5
    assert {name: path for name, path in named.items() if name not in known} == {}


@pytest.mark.parametrize("line", ["make tset", "- `make numerics` does it", "      - run: make portable JOBS=4"])
def test_a_name_that_is_no_target_would_be_seen(line):
    (found,) = MAKE.finditer(line)
    assert found[found.lastindex] not in TARGETS
