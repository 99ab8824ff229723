"""Measure recall, loss and cache of students.

Most of their layers see a window only.

    python recipes/upcycling_report.py recipes/configs/upcycle/report_cpu.yaml teacher=FOLDER_OR_GGUF [key=value ...]

Judges a teacher, and in `students` checkpoints, or what `upcycle()` makes of it. Nothing is trained. Recall is that of
lm-eval's recall tasks, at several windows, with Wilson's intervals; loss is that of `files` between `edges`; with
`written_tokens` students also write, and the teacher scores it. Writes results.json to `output_dir`, and to `results`.
A report that was stopped goes on with what it lacks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_checkpoint, check_known
from _lib.documents import token_ids
from _lib.entry import start
from _lib.scoring import long_texts
from _lib.sweeps import check_claim, claim, once, settings_of
from _lib.training import say, write_figures

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from upcycle import planned, student_settings

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.evaluation import (
    RECALL_TASKS,
    evaluate,
    loss_by_position,
    mean_by_position,
    teacher_scored_generation,
    wilson_interval,
)
from hf_hybrid_ssm.hub.delta_files import is_delta
from hf_hybrid_ssm.hub.whole_models import load_whole
from hf_hybrid_ssm.upcycle import Keep, Teacher, choose_layers, load_teacher, upcycle
from hf_hybrid_ssm.upcycle.loading import open_teacher
from hf_hybrid_ssm.upcycle.measurements import cache_bytes

TEACHER = "teacher"


@dataclass
class ReportArguments:
    """Whom to judge, and by what."""

    teacher: str = field(metadata={"help": "a checkpoint: folder, Hub name or .gguf file"})
    students: dict[str, str | dict[str, Any]] = field(
        default_factory=dict,
        metadata={
            "help": "name: a checkpoint, a delta of this teacher, or keep, keep_by, window and more of upcycle()"
        },
    )
    window: int = field(default=256, metadata={"help": "tokens that a token of students sees before its own"})
    tasks: list[str] = field(default_factory=lambda: ["recall_needle"], metadata={"help": ", ".join(RECALL_TASKS)})
    multiples: list[int] = field(default_factory=lambda: [4, 8], metadata={"help": "lengths of texts, in windows"})
    samples: int = field(default=60, metadata={"help": "texts of each length and task"})
    text_file: str | None = field(default=None, metadata={"help": "whose sentences are the filler; made by default"})
    files: list[str] = field(default_factory=list, metadata={"help": "held-out text: txt, jsonl or parquet"})
    text_column: str = "text"
    texts: int = field(default=4, metadata={"help": "documents that are read for loss by position"})
    edges: list[int] = field(
        default_factory=lambda: [64, 256, 512, 1024, 2048],
        metadata={"help": "positions between which loss is averaged"},
    )
    written_tokens: int = field(default=0, metadata={"help": "that students write after 64 of each text; 0: none"})
    cache_lengths: list[int] = field(default_factory=lambda: [1024, 4096, 16384, 65536])
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16, of all models"})
    seed: int = 0
    output_dir: str = "runs/upcycling-report"
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_known("tasks", self.tasks, RECALL_TASKS)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'.")
        if TEACHER in self.students:
            raise ValueError(f"students: {TEACHER!r} is the name of the model they are made of.")
        for name, student in self.students.items():
            if isinstance(student, str):
                check_checkpoint(student, f"students: {name!r}", AutoModelForCausalLM)


class Judge:
    """Everything that is asked of a model, once; answers lie in the folder.

    Args:
        texts: token ids (1, L) for loss by position.
    """

    def __init__(self, arguments: ReportArguments, teacher: Teacher, texts: list[torch.Tensor]):
        self.arguments, self.teacher, self.texts = arguments, teacher, texts
        self.folder = Path(arguments.output_dir)

    def judge(self, name: str, model: Callable[[], Any]) -> dict[str, Any]:
        """`model` makes what is judged; it is called for what is lacking."""
        found: dict[str, Any] = {"recall": {}}
        for task in self.arguments.tasks:
            for multiple in self.arguments.multiples:
                each = once(self._file(name, f"{task}-{multiple}"), partial(self._recall, model, task, multiple))
                found["recall"].setdefault(task, {})[f"{multiple}x"] = each
                say(f"{name}: {task} at {multiple} windows: {each['right']} of {each['count']}, {each['interval']}")
        if self.texts:
            found["loss"] = once(self._file(name, "loss"), partial(self._loss, model))
            say(f"{name}: loss {found['loss']['mean']}")
        found["cache_bytes"] = once(self._file(name, "cache"), partial(self._cache, model))
        if self.texts and self.arguments.written_tokens:
            found["written"] = once(self._file(name, "written"), partial(self._written, model))
        return found

    def _file(self, name: str, what: str) -> Path:
        return self.folder / f"{name}-{what}.json"

    def _recall(self, model: Callable[[], Any], task: str, multiple: int) -> dict[str, Any]:
        from lm_eval.models.huggingface import HFLM

        given = self.arguments
        metadata = {"window": given.window, "multiples": [multiple], "samples": given.samples, "seed": given.seed}
        if given.text_file is not None:
            metadata["text_file"] = given.text_file
        tokenizer, length = self.teacher.tokenizer, multiple * given.window
        harness = HFLM(pretrained=model(), tokenizer=tokenizer, batch_size=1, max_length=length)
        templated = bool(getattr(tokenizer, "chat_template", None))
        options = {"metadata": metadata, "bootstrap_iters": 0, "apply_chat_template": templated}
        found = evaluate(harness, [task], batch_size=1, **options)["results"][task]
        right, count = round(found["acc,none"] * found["sample_len"]), found["sample_len"]
        return {"right": right, "count": count, "interval": [round(end, 3) for end in wilson_interval(right, count)]}

    def _loss(self, model: Callable[[], Any]) -> dict[str, Any]:
        read = partial(loss_by_position, model(), piece=512)
        each = [mean_by_position(read(text), self.arguments.edges) for text in self.texts]
        return {"mean": {part: sum(text[part] for text in each) / len(each) for part in each[0]}, "by_text": each}

    def _cache(self, model: Callable[[], Any]) -> dict[str, int]:
        config = model().config
        lengths = self.arguments.cache_lengths
        return dict(zip(map(str, lengths), cache_bytes(config, lengths, "bfloat16")))

    def _written(self, model: Callable[[], Any]) -> dict[str, Any]:
        prompts = torch.cat([text[:, :64] for text in self.texts])
        tokens, seed = self.arguments.written_tokens, self.arguments.seed
        losses = teacher_scored_generation(model(), self.teacher.model, prompts, tokens, seed)
        return {"loss_by_teacher": float(losses.mean()), "tokens": losses.numel()}


def texts_of(arguments: ReportArguments, tokenizer: PreTrainedTokenizerBase) -> list[torch.Tensor]:
    """Token ids for loss by position, (1, last edge) each."""
    if not arguments.files:
        return []

    def encode(text: str) -> list[int]:
        return token_ids([text], tokenizer)[0]

    return long_texts(arguments.files, encode, arguments.edges[-1], arguments.texts, arguments.text_column)


def report(arguments: ReportArguments) -> dict[str, Any]:
    """Judge all; returns what is written to results.json."""
    folder = Path(arguments.output_dir)
    settings = settings_of(arguments)
    check_claim(folder, settings, arguments.overwrite)
    files = open_teacher(arguments.teacher)
    for given in arguments.students.values():
        if not isinstance(given, str):
            planned(files.config, given, arguments.window)
    teacher = load_teacher(files, dtype=getattr(torch, arguments.dtype))
    judge = Judge(arguments, teacher, texts_of(arguments, teacher.tokenizer))
    claim(folder, settings, arguments.overwrite, "*.json")
    found: dict[str, Any] = {TEACHER: judge.judge(TEACHER, lambda: teacher.model)}
    for name, student in arguments.students.items():
        if isinstance(student, str):
            found[name] = judge.judge(name, partial(_loaded, arguments, student))
            continue
        keep, options = student_settings(student, arguments.window)
        kept = once(folder / f"{name}-layers.json", partial(_chosen, teacher, keep, folder))
        say(f"{name}: {kept['text']}")
        chosen = replace(keep, parts=kept["layers"], by=None)
        found[name] = {"layers": kept["layers"], **judge.judge(name, partial(_made, teacher, chosen, options))}
    figures = {"settings": settings, "models": found}
    write_figures(figures, folder, arguments.results)
    return figures


def _chosen(teacher: Teacher, keep: Keep, folder: Path) -> dict[str, Any]:
    """The layers that are kept. One ranking down to the last layer tells all counts, so it lies in the folder."""

    def rank() -> dict[str, Any]:
        choice = choose_layers(teacher, replace(keep, parts=1), is_tried=False)
        return {"ranking": choice.ranking and choice.ranking.layers, "text": str(choice.ranking)}

    parts = keep.parts_of(teacher.config)
    if isinstance(keep.parts, int | float) and parts and keep.by != "even":
        found = once(folder / f"ranking-by-{keep.by or 'default'}-{keep.window}.json", rank)
        if found["ranking"] is not None:  # the teacher recalls
            layers = sorted(found["ranking"][: len(parts)])
            return {"layers": layers, "text": f"{found['text']}\nkept: {layers}"}
    choice = choose_layers(teacher, keep)
    return {"layers": choice.layers, "text": str(choice)}


def _loaded(arguments: ReportArguments, folder: str) -> Any:
    of_delta = {"teacher": arguments.teacher} if is_delta(folder) else {}
    return load_whole(AutoModelForCausalLM, folder, dtype=getattr(torch, arguments.dtype), **of_delta).eval()


def _made(teacher: Teacher, keep: Keep, options: dict[str, Any]) -> Any:
    return upcycle(teacher, keep, **options)[0].eval()


if __name__ == "__main__":
    start("upcycling_report.py", report, ReportArguments)
