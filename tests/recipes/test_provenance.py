"""Every committed result says what it was measured on, by what command and at which commit."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from _lib.provenance import ROOT, provenance
from _lib.training import write_figures

from benchmarks.table_text import RESULTS
from benchmarks.tables import source

COMMITS = r"[0-9a-f]{7,40}\+?(, [0-9a-f]{7,40}\+?)*"  # several where a run went on after one
MEASURED = sorted(RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_committed_results_name_machine_and_commit(path):
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert {"processor", "threads", "python", "torch", "transformers"} <= figures["machine"].keys()
    assert figures["command"].startswith("python ")
    assert re.fullmatch(COMMITS, figures["commit"]), figures["commit"]


def test_new_results_say_what_they_depend_on(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", [str(ROOT / "recipes/mqar.py"), "a.yaml", "settings=[[64, 4]]", "files=/my data/x"]
    )
    monkeypatch.setenv("HF_HYBRID_SSM_DATA", "/my data")
    write_figures({"loss": 1.5}, tmp_path, tmp_path / "shown.json")
    assert json.loads((tmp_path / "results.json").read_text()) == {"loss": 1.5}
    found = json.loads((tmp_path / "shown.json").read_text())
    assert found["command"] == "python recipes/mqar.py a.yaml 'settings=[[64, 4]]' 'files=$HF_HYBRID_SSM_DATA/x'"
    assert found["machine"]["torch"] == torch.__version__ and found["loss"] == 1.5
    if (ROOT / ".git").exists():
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert head.startswith(found["commit"].removesuffix("+"))


def test_pages_show_it():
    line = source(provenance() | {"command": "python benchmarks/x.py", "commit": "abc1234"})
    assert line.startswith("*`python benchmarks/x.py`: ") and line.endswith("; commit abc1234.*\n")
    assert f"torch {torch.__version__}, transformers {transformers.__version__}" in line
