"""Exported folders in an environment that pip filled with transformers, torch and lm-eval alone.

Building it takes minutes, so `make test` leaves it out and blocks the package's import instead (test_export.py);
`python -m tests.reporting clean-room` runs it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from _lib.documents import train_tokenizer
from safetensors.torch import load_file

from hf_hybrid_ssm.ops.core.dispatch import backend
from tests.hub.test_export import SCRIPT, VARIANTS, class_of
from tests.hub.without_package import answer
from tests.tiny_models import build, classes_of, config_of

ROOT = Path(__file__).parents[2]
WANTED = "HF_HYBRID_SSM_CLEAN_ROOM"
pytestmark = [
    pytest.mark.skipif(WANTED not in os.environ, reason=f"`python -m tests.reporting clean-room` sets {WANTED}"),
    pytest.mark.timeout(1800),
]
TEXTS = ["one two three apple four five six seven"] * 4


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
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def run(python, cwd, *arguments):
    ran = subprocess.run(
        [str(python), *map(str, arguments)],
        cwd=cwd,
        env=clean(
            HF_MODULES_CACHE=str(cwd / "modules"), HF_DATASETS_OFFLINE="1", HF_DATASETS_CACHE=str(cwd / "datasets")
        ),
        capture_output=True,
        text=True,
    )
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
    tokenizer = train_tokenizer(TEXTS, 300)
    config = config_of(VARIANTS[model_type], vocab_size=len(tokenizer))
    classes_of(VARIANTS[model_type])[class_of(model_type)](config).save_pretrained(
        tmp_path / "model", export_code=True
    )
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": "one two", "choices": [" three", " apple"], "label": 0}] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {"task": "counting", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}, "doc_to_text": "{{question}}"}
    task |= {"doc_to_target": "{{label}}", "doc_to_choice": "{{choices}}", "target_delimiter": ""}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "counting.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    printed = run(
        python, tmp_path, "-m", "lm_eval", "run", "--model", "hf", "--trust_remote_code",
        "--model_args", f"pretrained={tmp_path / 'model'}", "--tasks", "counting",
        "--include_path", tmp_path / "tasks", "--device", "cpu", "--batch_size", "2",
    )  # fmt: skip
    assert "counting" in printed and "acc" in printed
