"""Exported folders in an environment that pip filled with transformers, torch and lm-eval alone.

Building it takes minutes, so `make test` leaves it out and blocks the package's import instead (test_export.py);
`python -m tests.reporting clean-room` runs it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_hybrid_ssm.ops.core.dispatch import backend
from tests.cli.folders import save_checkpoint
from tests.evaluation.test_harness import write_task
from tests.hub.test_export import SCRIPT, VARIANTS, class_of
from tests.hub.without_package import answer
from tests.tiny_models import build

ROOT = Path(__file__).parents[2]
WANTED = "HF_HYBRID_SSM_CLEAN_ROOM"
pytestmark = [
    pytest.mark.skipif(WANTED not in os.environ, reason=f"`python -m tests.reporting clean-room` sets {WANTED}"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a new environment."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    executable = folder / "bin" / "python"
    install = [str(executable), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, "torch"], check=True)
    subprocess.run([*install, "transformers", "lm-eval[hf]"], check=True)
    missing = subprocess.run(
        [str(executable), "-c", "import hf_hybrid_ssm"], cwd=folder, env=clean(), capture_output=True
    )
    assert missing.returncode != 0
    return executable


def clean(**more):
    kept = {name: os.environ[name] for name in ("PATH", "HOME")}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | more


def run(python, cwd, *arguments):
    env = clean(HF_MODULES_CACHE=str(cwd / "modules"), HF_DATASETS_CACHE=str(cwd / "datasets"))
    ran = subprocess.run([python, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.parametrize("model_type", VARIANTS)
def test_answers_training_and_saving(python, tmp_path, model_type):
    model = build(VARIANTS[model_type], class_of(model_type))
    model.save_pretrained(tmp_path / "model", export_code=True)
    run(python, tmp_path, SCRIPT, tmp_path / "model")
    with backend("torch"):
        here = answer(model, torch.arange(3, 27).view(2, 12))
    there = load_file(tmp_path / "model" / "answers")
    assert torch.equal(here["logits"], there["logits"]) and torch.equal(here["text"], there["text"])


@pytest.mark.parametrize("model_type", ["longhorn", "bst", "lmu_isa", "spade"])
def test_stock_lm_eval(python, tmp_path, model_type):
    folder = save_checkpoint(tmp_path / "model", VARIANTS[model_type], export_code=True)
    write_task(tmp_path)
    options = ["--model_args", f"pretrained={folder}", "--tasks", "counting_here"]
    options += ["--include_path", tmp_path / "tasks", "--device", "cpu"]
    printed = run(python, tmp_path, "-m", "lm_eval", "run", "--model", "hf", "--trust_remote_code", *options)
    assert "counting_here" in printed and "acc" in printed
