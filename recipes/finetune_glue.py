"""Fine-tune a sequence classifier on the tasks of GLUE.

One table at the end.

    python recipes/finetune_glue.py recipes/configs/glue/local.yaml model_name_or_path=FOLDER [key=value ...]

Any model with a sequence-classification head will do, from a checkpoint or from scratch. Writes results.json (all runs
of the grid, the best of each task, the majority baseline), results.md, and the best runs' predictions to `output_dir`.
What was stopped goes on with the runs it lacks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_columns, check_known, check_labels, check_scores, check_texts, check_vocabulary
from _lib.compared_texts import ComparedTexts, PairCollator
from _lib.documents import token_ids, train_tokenizer
from _lib.entry import start
from _lib.runs import FineTuneArguments
from _lib.sweeps import check_claim, claim, once, settings_of
from _lib.training import Trainer, load_to_train, say, write_figures, write_lines, write_text

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import (
    CONFIG_MAPPING,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)

from hf_hybrid_ssm.hub.configurations import new_config


@dataclass(frozen=True)
class Task:
    """A task of GLUE: its text columns, its validation files, and its measures, of which the first selects a run."""

    columns: tuple[str, ...]
    measures: tuple[str, ...] = ("accuracy",)
    num_labels: int = 2
    validation: tuple[str, ...] = ("validation",)


TASKS = {
    "cola": Task(("sentence",), ("matthews",)),
    "sst2": Task(("sentence",)),
    "mrpc": Task(("sentence1", "sentence2"), ("f1", "accuracy")),
    "stsb": Task(("sentence1", "sentence2"), ("pearson", "spearman"), num_labels=1),
    "qqp": Task(("question1", "question2"), ("f1", "accuracy")),
    "mnli": Task(("premise", "hypothesis"), num_labels=3, validation=("validation_matched", "validation_mismatched")),
    "qnli": Task(("question", "sentence")),
    "rte": Task(("sentence1", "sentence2")),
}


@dataclass
class GlueArguments(FineTuneArguments):
    """The model and the tasks."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    data_folder: str | None = field(default=None, metadata={"help": "TASK/{train,validation}.jsonl; else the Hub"})
    pairs: str = field(
        default="together",
        metadata={"help": "the texts of a pair: together in one row, or apart, compared token by token"},
    )
    max_length: int = 256
    grid: dict[str, list] = field(
        default_factory=dict, metadata={"help": "training arguments to try, such as learning_rate: [1e-5, 1e-4]"}
    )

    def __post_init__(self):
        check_known("tasks", self.tasks, TASKS)
        super().__post_init__()
        if self.pairs not in ("together", "apart"):
            raise ValueError(f"pairs={self.pairs!r} must be 'together' or 'apart'.")


def load_task(name: str, data_folder: str | None) -> DatasetDict:
    """The splits `train` and those of `TASKS[name].validation` (those that exist)."""
    if data_folder is None:
        return load_dataset("nyu-mll/glue", name)
    folder = Path(data_folder) / name
    splits = ("train", *TASKS[name].validation)
    files = {split: str(folder / f"{split}.jsonl") for split in splits if (folder / f"{split}.jsonl").exists()}
    if len(files) < 2 or "train" not in files:
        raise FileNotFoundError(f"{folder} must hold train.jsonl and {TASKS[name].validation[0]}.jsonl.")
    return load_dataset("json", data_files=files)


def check_task(name: str, splits: DatasetDict) -> None:
    """Every split has the task's columns, and labels in its range."""
    task = TASKS[name]
    for split in ("train", *(split for split in task.validation if split in splits)):
        rows = splits[split]
        check_columns(rows, [*task.columns, "label"], f"{name} {split}")
        check_texts(rows, task.columns, f"{name} {split}")
        if task.num_labels > 1:
            check_labels(rows["label"], task.num_labels, f"{name} {split}")
        else:
            check_scores(rows["label"], f"{name} {split}")


def tokenized(rows: Dataset, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """`input_ids` and `labels`; the parts of a pair end with the end-of-text token unless the tokenizer has its own
    way. If they are too long, the longer part is truncated first."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        labels = [float(label) if task.num_labels == 1 else label for label in batch["label"]]
        texts = [batch[column] for column in task.columns]
        if tokenizer.sep_token_id is not None:
            return {**tokenizer(*texts, truncation=True, max_length=max_length), "labels": labels}
        parts = zip(*(token_ids(text, tokenizer) for text in texts))
        fitting = (longest_first(row, max_length - len(texts)) for row in parts)
        ids = [[token for part in row for token in [*part, tokenizer.eos_token_id]] for row in fitting]
        return {"input_ids": ids, "labels": labels}

    return rows.map(encode, batched=True, remove_columns=rows.column_names)


def tokenized_apart(rows: Dataset, task: Task, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """`first`, `second` and `labels`; what a row of both texts would have room for, and no special tokens."""

    def encode(batch: dict[str, list]) -> dict[str, list]:
        parts = zip(*(token_ids(batch[column], tokenizer) for column in task.columns))
        fitting = [longest_first(row, max_length - len(task.columns)) for row in parts]
        first, second = ([row[part] or [tokenizer.pad_token_id] for row in fitting] for part in (0, 1))
        labels = [float(label) if task.num_labels == 1 else label for label in batch["label"]]
        lengths = [max(map(len, pair)) for pair in zip(first, second)]  # by which rows of like length are grouped
        return {"first": first, "second": second, "labels": labels, "length": lengths}

    return rows.map(encode, batched=True, remove_columns=rows.column_names)


def longest_first(parts: Sequence[list[int]], length: int) -> list[list[int]]:
    """One or two parts, together at most `length` tokens, the longer one truncated first."""
    if len(parts) == 1:
        return [parts[0][:length]]
    first, second = parts
    kept = max((length + 1) // 2, length - len(second))
    first = first[:kept]
    return [first, second[: length - len(first)]]


def measures_of(task: Task, labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    functions: dict[str, Any] = {
        "accuracy": accuracy_score,
        "f1": f1_score,
        "matthews": matthews_corrcoef,
        "pearson": lambda a, b: pearsonr(a, b).statistic,
        "spearman": lambda a, b: spearmanr(a, b).statistic,
    }
    if task.num_labels == 1 and np.ptp(predicted) == 0:
        return dict.fromkeys(task.measures, 0.0)  # a constant correlates with nothing
    return {name: 100 * float(functions[name](labels, predicted)) for name in task.measures}


def build(arguments: GlueArguments, task: Task, texts: Dataset) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The classifier and its tokenizer."""
    regression = {"problem_type": "regression"} if task.num_labels == 1 else {}
    options = {"num_labels": task.num_labels, **regression, **arguments.config}
    if arguments.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
        source = (AutoModelForSequenceClassification, arguments.model_name_or_path)
        model = load_to_train(*source, new_weights=arguments.from_scratch, **options)
    else:
        tokenizer = train_tokenizer((text for column in task.columns for text in texts[column]), 4096)
        special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        if getattr(CONFIG_MAPPING[str(arguments.model_type)], "is_encoder_decoder", False):
            special["decoder_start_token_id"] = tokenizer.pad_token_id
        values = {"vocab_size": len(tokenizer)} | special | options
        model = AutoModelForSequenceClassification.from_config(new_config(str(arguments.model_type), **values))
    check_vocabulary(model, tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def finetune(name: str, arguments: GlueArguments, training: TrainingArguments) -> dict[str, Any]:
    """One run on one task: measures and predictions on each validation split."""
    set_seed(training.seed)
    task, splits = TASKS[name], load_task(name, arguments.data_folder)
    check_task(name, splits)
    train = splits["train"].shuffle(seed=training.seed)
    if arguments.max_train_rows is not None:
        train = train.select(range(min(arguments.max_train_rows, len(train))))
    model, tokenizer = build(arguments, task, train)
    encode, collator = tokenized, DataCollatorWithPadding(tokenizer)
    if arguments.pairs == "apart" and len(task.columns) == 2:
        middle = float(np.mean(train["label"])) if task.num_labels == 1 else 0.0
        model = ComparedTexts(model.base_model, task.num_labels, middle)
        encode, collator = tokenized_apart, PairCollator(tokenizer.pad_token_id)
        training.remove_unused_columns = False
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=encode(train, task, tokenizer, arguments.max_length),
        data_collator=collator,
        processing_class=tokenizer,
    )
    run = trainer.train()
    measures: dict[str, dict[str, float]] = {}
    baseline: dict[str, dict[str, float]] = {}
    predictions: dict[str, list[float]] = {}
    for split in (split for split in task.validation if split in splits):
        outputs = trainer.predictions(encode(splits[split], task, tokenizer, arguments.max_length))
        predicted = outputs[:, 0] if task.num_labels == 1 else outputs.argmax(-1)
        labels = np.array(splits[split]["label"])
        values, counts = np.unique(np.array(train["label"]), return_counts=True)
        guess = np.full(len(labels), values[counts.argmax()])
        for found, said in ((measures, predicted), (baseline, guess)):
            found[split] = {name: round(value, 2) for name, value in measures_of(task, labels, said).items()}
        predictions[split] = predicted.tolist()
    seconds = round(run.metrics["train_runtime"], 1)
    return {"measures": measures, "majority": baseline, "seconds": seconds, "predictions": predictions}


def glue(arguments: GlueArguments, training: TrainingArguments) -> dict[str, Any]:
    """All tasks, all points of the grid."""
    arguments.check_checkpoint(AutoModelForSequenceClassification)
    if arguments.model_name_or_path is not None:
        AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    settings = settings_of(arguments, training)
    check_claim(training.output_dir, settings, arguments.overwrite)
    for name in arguments.tasks:  # the last task's data too, before the first one trains
        check_task(name, load_task(name, arguments.data_folder))
    claim(training.output_dir, settings, arguments.overwrite, "*/run-*.json")
    results: dict[str, Any] = {}
    points = [dict(zip(arguments.grid, values)) for values in itertools.product(*arguments.grid.values())]
    for name in arguments.tasks:
        runs = []
        for number, point in enumerate(points):
            folder = Path(training.output_dir) / name
            options = TrainingArguments(**(training.to_dict() | point | {"output_dir": str(folder)}))
            found = once(folder / f"run-{number}.json", partial(finetune, name, arguments, options))
            runs.append({"settings": point, **found})
        split, first = TASKS[name].validation[0], TASKS[name].measures[0]
        best = max(runs, key=lambda run: run["measures"][split][first])
        for split, predicted in best["predictions"].items():
            lines = ({"row": number, "prediction": value} for number, value in enumerate(predicted))
            write_lines(Path(training.output_dir) / name / f"predictions_{split}.jsonl", lines)
        for found in runs:
            del found["predictions"]
        results[name] = {"best": best, "runs": runs}
        write_figures(results, training.output_dir, arguments.results)
    table = table_of(results)
    write_text(Path(training.output_dir) / "results.md", table)
    say(table)
    return results


def table_of(results: dict[str, Any]) -> str:
    """A row for each task and split: the best run next to the majority baseline."""
    lines = ["| task | measure | fine-tuned | majority |", "| --- | --- | ---: | ---: |"]
    for name, result in results.items():
        for split, measures in result["best"]["measures"].items():
            label = name if split == "validation" else f"{name} {split.removeprefix('validation_')}"
            values = " / ".join(f"{value:.1f}" for value in measures.values())
            majority = " / ".join(f"{value:.1f}" for value in result["best"]["majority"][split].values())
            lines.append(f"| {label} | {' / '.join(measures)} | {values} | {majority} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    start("finetune_glue.py", glue, GlueArguments, TrainingArguments)
