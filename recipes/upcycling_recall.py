"""Measure what students of a transformer still recall.

The teacher has solved a task; its students have less attention.

    python recipes/upcycling_recall.py recipes/configs/upcycle/recall_cpu.yaml [key=value ...]

Each of `tasks` is `pairs` (settings of mqar.py's rows) or `first_token` (of first_token_recall.py's), with training
settings of the `teacher` and of upcycle.py's stages `align` and `finetune`, both on the task's own rows. What a
student recalls is measured before and after them. Writes results.json to `output_dir`, and to `results`. A comparison
that was stopped goes on with the models it lacks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_named
from _lib.entry import start
from _lib.intervals import mean_of
from _lib.stages import Stage, StageTrainer
from _lib.sweeps import check_claim, claim, once, settings_of
from _lib.training import Trainer, say, write_figures

import torch
from datasets import Dataset
from first_token_recall import RecallArguments, StopWhenSolved, accuracy_by_distance, training_rows
from mqar import MqarArguments, data_of, groups
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from upcycle import planned, student_settings, within

from hf_hybrid_ssm.hub.configurations import new_config
from hf_hybrid_ssm.upcycle import Teacher, upcycle
from hf_hybrid_ssm.upcycle.loading import open_teacher
from hf_hybrid_ssm.upcycle.student import new_modules

KINDS = ("pairs", "first_token")
STAGES = ("align", "finetune")
TEACHER = "teacher"
TEST_BATCH = 64


@dataclass
class UpcyclingRecallArguments:
    """Which students, on which tasks."""

    teacher: dict[str, Any] = field(metadata={"help": "fields of a Llama's configuration"})
    students: dict[str, dict[str, Any]] = field(
        metadata={"help": "name: keep, keep_by, window and other arguments of upcycle()"}
    )
    tasks: dict[str, dict[str, Any]] = field(
        metadata={"help": "name: pairs or first_token, settings of rows; teacher, align, finetune, of training"}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    enough: float = field(default=0.02, metadata={"help": "training loss at which a run stops: the task is solved"})
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_named(self, "students", "tasks", "seeds")
        if TEACHER in self.students:
            raise ValueError(f"students: {TEACHER!r} is the name of the model they are made of.")
        known = set(TrainingArguments.__dataclass_fields__)
        for name, task in self.tasks.items():
            if len([kind for kind in KINDS if kind in task]) != 1:
                raise ValueError(f"tasks: {name!r} has {sorted(task)}; it must have one of {', '.join(KINDS)}.")
            if unknown := sorted(set(task) - {*KINDS, TEACHER, *STAGES}):
                raise ValueError(f"tasks: {name!r} has {unknown}, which are not among {(*KINDS, TEACHER, *STAGES)}.")
            if "train_rows" not in task.get("first_token", {"train_rows": None}):
                raise ValueError(f"tasks: first_token of {name!r} must have train_rows, how many rows to train on.")
            for part in (TEACHER, *STAGES):
                if unknown := sorted(set(task.get(part, {})) - known):
                    raise ValueError(f"tasks: {part} of {name!r} has {unknown}, which are not training arguments.")


@dataclass
class Task:
    """Rows to learn from, and what is counted: name → share of right answers."""

    vocab_size: int
    rows: Callable[[int], Dataset]
    measure: Callable[[PreTrainedModel], dict[str, float]]


@torch.no_grad()
def share_of_pairs(model: PreTrainedModel, rows: Dataset) -> float:
    """Of all queries of the rows, how many are answered by their value."""
    right = asked = 0
    for batch in rows.iter(TEST_BATCH):
        labels = batch["labels"][:, 1:].to(model.device)
        found = model(batch["input_ids"].to(model.device), use_cache=False).logits[:, :-1].argmax(-1)
        right += int((found == labels).sum())
        asked += int((labels != -100).sum())
    return right / asked


def task_of(settings: dict[str, Any]) -> Task:
    if "pairs" in settings:
        given = MqarArguments(models={}, mixed=True, **settings["pairs"])
        several = groups(given)
        if len(several) != 1:
            raise ValueError(f"pairs: settings={given.settings} must have rows of one length.")
        train, test = data_of(*several[0], given)
        return Task(
            given.vocab_size,
            lambda seed: train,
            lambda model: {f"{pairs} pairs": share_of_pairs(model, rows) for pairs, rows in test.items()},
        )
    chosen = dict(settings["first_token"])
    rows = chosen.pop("train_rows")
    asked = RecallArguments(models={TEACHER: {"model_type": "llama"}}, **chosen)
    return Task(
        asked.vocab_size,
        lambda seed: Dataset.from_dict(training_rows(asked, rows, seed)).with_format("torch"),
        lambda model: {
            f"{int(distance):,} tokens": share for distance, share in accuracy_by_distance(model, asked).items()
        },
    )


def training_of(training: TrainingArguments, seed: int, settings: dict[str, Any]) -> TrainingArguments:
    return TrainingArguments(**(training.to_dict() | settings | {"seed": seed}))


def train_teacher(
    arguments: UpcyclingRecallArguments, task: Task, training: TrainingArguments, folder: Path
) -> dict[str, Any]:
    """Until it has solved the task, or the steps are over; its weights are left in the folder."""
    set_seed(training.seed)
    fields = arguments.teacher | {"vocab_size": task.vocab_size}
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(new_config("llama", **fields))
    trainer = Trainer(
        model=model, args=training, train_dataset=task.rows(training.seed), data_collator=default_data_collator
    )
    trainer.add_callback(StopWhenSolved(arguments.enough))
    trainer.train()
    model.eval().save_pretrained(folder)
    return {"recall": task.measure(model), "parameters": model.num_parameters(), "steps": trainer.state.global_step}


def train_student(
    arguments: UpcyclingRecallArguments,
    task: Task,
    stages: dict[str, TrainingArguments],
    student: dict[str, Any],
    teacher_folder: Path,
) -> dict[str, Any]:
    """Align what is new with the teacher's attention, then train all of it on the task."""
    seed = next(iter(stages.values())).seed
    set_seed(seed)
    teacher = Teacher(open_teacher(teacher_folder).load_model(torch.float32).requires_grad_(False))
    keep, options = student_settings(student)
    model, _ = upcycle(teacher, keep, **options)
    found: dict[str, Any] = {"parameters": model.num_parameters(), "recall_at_the_start": task.measure(model.eval())}
    new = new_modules(model)
    for stage, training in stages.items():
        if stage == "align" and not new:
            continue
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(stage != "align" or within(name, new))
        trainer = StageTrainer(
            model=model, args=training, train_dataset=task.rows(seed), data_collator=default_data_collator,
            stage=Stage(stage, teacher),
        )  # fmt: skip
        if stage == "finetune":
            trainer.add_callback(StopWhenSolved(arguments.enough))
        trainer.train()
        found[f"steps_of_{stage}"] = trainer.state.global_step
    return found | {"recall": task.measure(model.eval())}


def recall(arguments: UpcyclingRecallArguments, training: TrainingArguments) -> dict[str, Any]:
    """All models of all tasks, seed by seed; returns what is written to results.json."""
    settings = settings_of(arguments, training)
    folder = Path(training.output_dir)
    check_claim(folder, settings, arguments.overwrite)
    tasks = {name: task_of(each) for name, each in arguments.tasks.items()}
    for task in tasks.values():  # every student can be made, before the first teacher trains
        config = new_config("llama", **(arguments.teacher | {"vocab_size": task.vocab_size}))
        for fields in arguments.students.values():
            planned(config, fields)
    claim(folder, settings, arguments.overwrite, "*.json")
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in tasks}
    figures: dict[str, Any] = {}
    for seed in arguments.seeds:
        for name, task in tasks.items():
            given = {
                part: training_of(training, seed, arguments.tasks[name].get(part, {})) for part in (TEACHER, *STAGES)
            }
            place = folder / f"{name}-{TEACHER}-{seed}"
            make = partial(train_teacher, arguments, task, given.pop(TEACHER), place)
            runs[name].setdefault(TEACHER, []).append({"seed": seed, **once(f"{place}.json", make)})
            for student, fields in arguments.students.items():
                make = partial(train_student, arguments, task, given, fields, place)
                made = once(folder / f"{name}-{student}-{seed}.json", make)
                runs[name].setdefault(student, []).append({"seed": seed, **made})
        figures = {"settings": settings}
        figures["tasks"] = {
            name: {model: summary(several) for model, several in models.items()} for name, models in runs.items()
        }
        write_figures(figures, folder, arguments.results)
        say(figures["tasks"])
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds and half the widths of their 95 % intervals, and the runs."""
    found: dict[str, Any] = {}
    for kind in ("recall_at_the_start", "recall"):
        if kind in runs[0]:
            shares = {what: [run[kind][what] for run in runs] for what in runs[0][kind]}
            found[kind] = {what: mean_of(each) for what, each in shares.items()}
    return found | {"runs": runs}


if __name__ == "__main__":
    start("upcycling_recall.py", recall, UpcyclingRecallArguments, TrainingArguments)
