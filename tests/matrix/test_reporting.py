"""`Trainer` reports losses of a family where `report_to` says."""

import pytest
from transformers import Trainer, TrainingArguments

from tests import tiny_models

FILES = {"tensorboard": "out/runs/**/events*", "trackio": "trackio/*.db", "wandb": "wandb/offline-run-*/*.wandb"}


@pytest.mark.parametrize("program", FILES)
def test_losses_are_reported(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    module = pytest.importorskip(program)  # which reads them
    rows = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 8
    settings = {"max_steps": 2, "logging_steps": 1, "use_cpu": True, "save_strategy": "no", "run_name": "own"}
    arguments = TrainingArguments("out", report_to=program, **settings)
    Trainer(tiny_models.language_model("longhorn"), arguments, train_dataset=rows).train()
    if program == "wandb":
        module.finish()  # as at the end of a process
    written = list(tmp_path.glob(FILES[program]))
    assert written and any(b"train/loss" in path.read_bytes() for path in written)
