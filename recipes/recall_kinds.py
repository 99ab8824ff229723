"""Measure what students recall of facts of many kinds.

Beside their teacher, with the bytes of their caches.

    python recipes/recall_kinds.py recipes/configs/upcycle/kinds_cpu.yaml teacher=FOLDER_OR_GGUF [key=value ...]

Facts lie between the lines of real `files` (novels, dialogues, code), and each is asked for by itself: whole answers,
by default of the kinds that neither choice nor training may see. With `loss_files`, loss by position too. Students are
checkpoints, or made of the teacher. Writes results.json to `output_dir`, and to `results`. What was measured is
not measured again.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.documents import paths_of
from _lib.entry import start
from _lib.scoring import long_texts
from _lib.sweeps import check_claim, claim, once, settings_of
from _lib.training import say, write_figures

import torch
from transformers import AutoModelForCausalLM

import hf_hybrid_ssm  # noqa: F401 - registers the students
from hf_hybrid_ssm.evaluation import loss_by_position, mean_by_position
from hf_hybrid_ssm.evaluation.recall_tasks.kinds import HELD_OUT
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import answers_of, kinds_table
from hf_hybrid_ssm.evaluation.recall_tasks.real_texts import RealText, real_texts
from hf_hybrid_ssm.upcycle import Keep, load_teacher, upcycle
from hf_hybrid_ssm.upcycle.measurements import cache_bytes

TEACHER = "teacher"


@dataclass
class RecallKindsArguments:
    """Whom to ask, and what."""

    teacher: str = field(metadata={"help": "a checkpoint: folder, Hub name or .gguf file"})
    files: list[str] = field(metadata={"help": "JSON lines with a field text, document or dialogue, or plain text"})
    output_dir: str
    students: dict[str, str | dict[str, Any]] = field(
        default_factory=dict, metadata={"help": "name: a checkpoint, or keep (layers, [layer, group]) and window"}
    )
    kinds: list[str] = field(default_factory=lambda: list(HELD_OUT))
    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    texts: int = field(default=20, metadata={"help": "of each length; each is asked for every kind"})
    window: int = field(default=256, metadata={"help": "tokens between a fact and its question, at least"})
    loss_files: list[str] = field(default_factory=list, metadata={"help": "with a column text"})
    loss_texts: int = 4
    edges: list[int] = field(default_factory=lambda: [64, 256, 512, 1024, 2048])
    cache_lengths: list[int] = field(default_factory=lambda: [4096, 65536])
    dtype: str = "bfloat16"
    seed: int = 0
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False


def measure(arguments: RecallKindsArguments) -> dict[str, Any]:
    """All models; returns what is written to results.json."""
    folder = Path(arguments.output_dir)
    settings = settings_of(arguments)
    asked = {name: value for name, value in settings.items() if name != "students"}  # more students may follow
    check_claim(folder, asked, arguments.overwrite)
    teacher = load_teacher(arguments.teacher, dtype=getattr(torch, arguments.dtype))
    make = partial(
        real_texts, teacher.tokenizer, paths_of(arguments.files), count=arguments.texts, window=arguments.window
    )
    texts = {length: make(length=length, kinds=arguments.kinds, seed=arguments.seed) for length in arguments.lengths}
    read = _loss_texts(arguments, teacher.tokenizer)
    claim(folder, asked, arguments.overwrite, "*.json")
    models = {TEACHER: _judge(arguments, TEACHER, teacher.model, texts, read)}
    for name, given in arguments.students.items():
        if isinstance(given, str):
            student = AutoModelForCausalLM.from_pretrained(given, dtype=teacher.model.dtype).eval()
        else:
            student, report = upcycle(
                teacher, Keep(given.get("keep", ()), window=given.get("window", arguments.window))
            )
            say(report)
        models[name] = _judge(arguments, name, student, texts, read)
    figures = {"settings": settings, "models": models}
    write_figures(figures, folder, arguments.results)
    answers = {
        name: {int(length): answers for length, answers in found["answers"].items()} for name, found in models.items()
    }
    say(kinds_table(answers))
    return figures


def _judge(
    arguments: RecallKindsArguments, name: str, model: Any, texts: dict[int, list[RealText]], read: list[torch.Tensor]
) -> dict[str, Any]:
    def file(what: str) -> Path:
        return Path(arguments.output_dir) / f"{name.replace(' ', '-')}-{what}.json"

    def losses() -> dict[str, Any]:
        each = [mean_by_position(loss_by_position(model, text), arguments.edges) for text in read]
        return {"mean": {part: sum(text[part] for text in each) / len(each) for part in each[0]}, "by_text": each}

    def cache() -> dict[str, int]:
        lengths = arguments.cache_lengths
        return dict(zip(map(str, lengths), cache_bytes(model.config, lengths, "bfloat16")))

    found: dict[str, Any] = {"cache_bytes": once(file("cache"), cache), "answers": {}}
    for length, several in texts.items():
        answers = once(file(f"{length}"), partial(answers_of, model, several))
        found["answers"][str(length)] = answers
        right = sum(each.count("1") for each in answers.values())
        say(f"{name}: {right} of {sum(map(len, answers.values()))} in {length:,} tokens")
    return found | ({"loss": once(file("loss"), losses)} if read else {})


def _loss_texts(arguments: RecallKindsArguments, tokenizer: Any) -> list[torch.Tensor]:
    """Token ids for loss by position, (1, last edge) each, with a begin token where the tokenizer has one."""
    if not arguments.loss_files:
        return []

    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    return long_texts(arguments.loss_files, encode, arguments.edges[-1], arguments.loss_texts)


if __name__ == "__main__":
    start("recall_kinds.py", measure, RecallKindsArguments)
