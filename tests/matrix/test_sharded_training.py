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
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in wanted], rel=1e-4)
    assert found[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=1e-4)
    load = (AutoModelForSeq2SeqLM if variant == "encoder-decoder" else AutoModelForCausalLM).from_pretrained
    (saved, report), expected, begun = load(tmp_path, output_loading_info=True), load(one), load(start)
    assert not any(report.values())
    moved = {name: weight - begun.state_dict()[name] for name, weight in expected.state_dict().items()}
    assert sum(bool(move.abs().max() > 1e-4) for move in moved.values()) > 4
    for name, weight in saved.state_dict().items():
        difference = weight - expected.state_dict()[name]
        assert weight.dtype == torch.float32 and difference.abs().max() <= 1e-2 * moved[name].abs().max() + 1e-6, name


@pytest.mark.parametrize("variant", ["longhorn", "longhorn + window and full attention", "student with a mixer"])
def test_sequence_parallelism_is_refused(variant, environment):
    """As its own code says that it has begun (`tests/distributed/test_rows_shared_out.py`: all kinds)."""
    for done in run_ranks([HERE / "tests/matrix/rows_shared_out.py", variant], env=environment):
        assert done.returncode == 0 and "each process a shard of every row" in done.stdout, done.stderr[-3000:]
