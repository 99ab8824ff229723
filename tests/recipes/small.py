"""What tests of recipes share: the settings of a short training on a processor, files of rows, and a run that is
killed."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from _lib.standard_text import standard_documents
from _lib.training import Trainer
from safetensors.torch import load_file
from transformers import TrainingArguments

QUIET = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no",
}  # fmt: skip


def training(folder: Path, kind: Any = TrainingArguments, **options: Any) -> Any:
    """Training arguments; checkpoints are saved where `save_steps` says so."""
    saving = {"save_strategy": "steps"} if "save_steps" in options else {}
    return kind(str(folder), **QUIET | saving | options)


def write_lines(path: Path, rows: Iterable[Any]) -> str:
    """The path of a file of rows as JSON, one a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def numbered_texts(folder: Path) -> str:
    """A file of twenty documents."""
    lines = [" ".join(f"word {number} of {text}" for number in range(40)) for text in range(20)]
    return write_lines(folder / "texts.jsonl", [{"text": line} for line in lines])


def standard_texts(folder: Path) -> Path:
    """The folder, with train.jsonl and held_out.jsonl of the standard library's documentation."""
    for name, documents, count in zip(("train", "held_out"), standard_documents(most=60), (20, 4), strict=True):
        write_lines(folder / f"{name}.jsonl", [{"text": text[:3000]} for text in documents["text"][:count]])
    return folder


def killed_and_resumed(run: Callable[[Path, str | None], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """A run that is killed in its seventh step and goes on ends with the bits of one that was not; its results.

    Args:
        run: the recipe, with its folder and `resume`; it saves every four steps.
    """
    whole, step, done = run(folder / "whole", None), Trainer.training_step, []

    def killed(self: Any, *inputs: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == 7:
            raise KeyboardInterrupt
        return step(self, *inputs, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "training_step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(folder / "killed", None)
        with pytest.raises(FileExistsError, match="overwrite"):
            run(folder / "killed", None)
        resumed = run(folder / "killed", "auto")
    assert len(done) == 7 + whole["steps"] - 4  # which begins after the fourth step
    assert all(resumed[name] == whole[name] for name in whole if name.startswith(("validation", "test")))
    first, second = (load_file(folder / name / "model.safetensors") for name in ("whole", "killed"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    return whole
