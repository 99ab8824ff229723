"""DeepSpeed

A folder is loaded and trained by two processes on CPUs that share optimizer state and gradients (stage 2), or
parameters too, which a model is then built and loaded without (stage 3): two steps of SGD have the losses and
gradient norms of one process, and the weights that are saved are those of one process.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.matrix.sharded_training import train
from tests.processes import run_ranks
from tests.tiny_models import ROWS, own_language_model

pytest.importorskip("deepspeed")
HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of CPUs; what DeepSpeed compiles is compiled once."""
    of_cpus = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path_factory.mktemp("extensions"))}
    return os.environ | of_cpus | {"PYTHONPATH": f"{HERE / 'src'}{os.pathsep}{HERE}"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """→ of a variant: where it lies, and what one process made of it."""
    made = {}

    def of(variant):
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("one") / "start", tmp_path_factory.mktemp("one")
            own_language_model(variant).float().save_pretrained(made[variant][0])
            train(0, *made[variant])
        return made[variant]

    return of


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("variant", ROWS)
def test_two_processes_train_as_one(variant, stage, folders, environment, tmp_path):
    start, one = folders(variant)
    for done in run_ranks([HERE / "tests/matrix/sharded_training.py", stage, start, tmp_path], env=environment):
        assert done.returncode == 0, done.stderr[-3000:]
    found, wanted = (json.loads((out / "log.json").read_text(encoding="utf-8"))[:2] for out in (tmp_path, one))
    for step, other in zip(found, wanted, strict=True):
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(other[name], rel=1e-4), (name, found, wanted)
    load = (AutoModelForSeq2SeqLM if variant == "encoder-decoder" else AutoModelForCausalLM).from_pretrained
    (saved, report), expected = load(tmp_path, output_loading_info=True), load(one).state_dict()
    assert not any(report.values())
    for name, weight in saved.state_dict().items():
        assert weight.dtype == expected[name].dtype, name
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    begun = load(start).state_dict()
    assert sum(bool((weight - begun[name]).abs().max() > 1e-3) for name, weight in expected.items()) > 4
