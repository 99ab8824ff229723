"""The commands of README.md: the two that set up everything, and those of a user's own environment."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from hf_hybrid_ssm.auto import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = [
    [line.partition("  #")[0].strip() for line in block.splitlines()]
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
]


def block_with(command):
    return next(block for block in SHELL if command in block)


def test_two_commands_set_up_everything_and_ci_runs_both_in_a_fresh_clone():
    """An environment from nothing takes minutes, so the run that begins with none is that of `.ci/run`."""
    assert SHELL[0] == ["make demo", "make test"]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for command in SHELL[0]:
        assert re.search(rf"^{command}\b", script, re.MULTILINE), f".ci/run does not run {command}"
    assert 'export VENV="$work/venv"' in script and "HF_HYBRID_SSM_CACHE=" in script
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for target in ("demo", "test"):
        command = ["make", "--dry-run", "--no-print-directory", target, "VENV=nowhere/there"]
        dry = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True).stdout
        assert "-m venv nowhere/there" in dry and "nowhere/there/bin/python" in dry.splitlines()[-1]


def test_papers_are_those_of_the_families():
    for family in FAMILIES:
        entry = next(text for text in README.split("@") if family.card.arxiv in text and "title = {" in text)
        assert f"title = {{{family.card.title}}}" in entry
        authors = re.search(r"author = {(.*)}", entry)[1].split(" and ")
        assert sorted(authors) == sorted(family.card.authors.split("; "))


@pytest.fixture(scope="module")
def own_environment(tmp_path_factory):
    """A new environment without this package; pip and what it would fetch lie on its path."""
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    folder = tmp_path_factory.mktemp("own") / "venv"
    venv.create(folder)
    (there,) = folder.glob("lib/python*/site-packages")
    paths = dict.fromkeys([sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))])
    (there / "requirements.pth").write_text("\n".join(paths), encoding="utf-8")
    return folder


@pytest.mark.skipif(os.name != "posix", reason="the folder of scripts has another name")
def test_an_own_environment(own_environment, tmp_path):
    """`pip install` in a clone, then its commands from a folder that is none; the demo with fewer steps."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment |= {"PATH": f"{own_environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    commands = block_with("hf-hybrid-ssm doctor")
    assert [shlex.split(command)[0] for command in commands] == ["pip", "hf-hybrid-ssm", "hf-hybrid-ssm"]
    said = []
    for command in commands:
        words = shlex.split(command)
        if words[0] == "pip":
            words = ["python", "-m", *words, "--no-build-isolation"]
        elif words[-1] == "demo":
            words += ["--steps", "2", "--questions", "4", "--documents", "40"]
        where = ROOT if "pip" in words else tmp_path
        done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        said.append(done.stdout)
    assert "Successfully installed hf-hybrid-ssm" in said[0]
    assert str(own_environment) in said[1] or "longhorn_scan" in said[1]
    assert "held-out perplexity" in said[2] and (tmp_path / "runs/demo/summary.json").is_file()
