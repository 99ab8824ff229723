"""A result says what it was measured on, by what command and at which commit."""

import json
import subprocess
import sys

import torch
from _lib.provenance import ROOT
from _lib.training import write_figures


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
