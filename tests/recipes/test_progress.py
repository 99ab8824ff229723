"""Progress in tokens: lines where there is no terminal, a bar on one, never both and never a dict."""

import io
import re
import sys

import pytest
import torch
from _lib.training import Trainer
from transformers import TrainingArguments

from tests.tiny_models import build


class Terminal(io.StringIO):
    def isatty(self):
        return True


def train(tmp_path, **options):
    model = build("longhorn", "LonghornForCausalLM").train()
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 20, (16, 10))]
    given = {"max_steps": 6, "logging_steps": 2, "per_device_train_batch_size": 4, "report_to": "none"}
    given |= {"use_cpu": True, "save_strategy": "no", "gradient_accumulation_steps": 2}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **given | options), train_dataset=rows)
    trainer.train()
    return trainer


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_lines_without_a_terminal(tmp_path, capsys, disable_tqdm):
    trainer = train(tmp_path, disable_tqdm=disable_tqdm)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 3 and "it/s" not in printed.err
    for number, line in zip((2, 4, 6), lines, strict=True):
        assert re.match(rf"step {number}/6  [\d,]+ tokens/s  \d\d:\d\d left  loss \d", line)
    assert trainer._progress.tokens == 6 * 2 * 4 * 10


def test_a_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    train(tmp_path, disable_tqdm=False)
    shown = screen.getvalue()
    assert re.search(r"[\d,]+ tokens/s: +100%", shown) and "loss" in shown and "6/6" in shown
    assert not capsys.readouterr().out
