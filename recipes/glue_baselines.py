"""What words alone reach on GLUE: a bag of words, and for pairs how many words the two texts share.

    python recipes/glue_baselines.py recipes/configs/glue/baselines.yaml [key=value ...]

Both read the training rows that finetune_glue.py reads with the same `max_train_rows` and seeds, on the same measures.
The bag counts words and pairs of neighbours (of the two texts of a pair apart), weighs them by tf-idf, and feeds a
linear model; the overlap is three numbers a pair (shared words over all, over the first text's, over the second's) and
as many coefficients. Nothing is tuned. Writes results.json to `output_dir` and, with `results`, to that file.
"""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from _lib.settings import read_settings
from _lib.training import say, write_figures
from datasets import Dataset
from finetune_glue import TASKS, check_task, load_task, measures_of
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge

WORDS = r"(?u)\b\w+\b|[!?]"


@dataclass
class BaselineArguments:
    """The tasks and their data."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    data_folder: str | None = field(default=None, metadata={"help": "TASK/{train,validation}.jsonl; else the Hub"})
    max_train_rows: int | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "of the choice of training rows"})
    output_dir: str = "runs/glue-baselines"
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        if unknown := sorted(set(self.tasks) - set(TASKS)):
            raise ValueError(f"tasks={unknown} are not among {sorted(TASKS)}.")
        if not self.seeds:
            raise ValueError("seeds=[] must name at least one.")


def overlap(first: str, second: str) -> tuple[float, float, float]:
    """Shared words of two texts over all their words, over the first's and over the second's."""
    one, other = (set(TfidfVectorizer(token_pattern=WORDS).build_analyzer()(text)) for text in (first, second))
    shared = len(one & other)
    return tuple(shared / max(size, 1) for size in (len(one | other), len(one), len(other)))  # type: ignore[return-value]


def overlaps(rows: Dataset, columns: tuple[str, ...]) -> np.ndarray:
    """(rows, 3)."""
    return np.array([overlap(*pair) for pair in zip(*(rows[column] for column in columns))])


def bags(train: Dataset, others: list[Dataset], columns: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """tf-idf of the training rows, and of the others by the training rows' vocabulary; a block a column."""
    blocks = []
    for column in columns:
        words = TfidfVectorizer(token_pattern=WORDS, ngram_range=(1, 2), sublinear_tf=True)
        blocks.append([words.fit_transform(train[column]), *(words.transform(rows[column]) for rows in others)])
    first, *rest = (hstack(parts).tocsr() for parts in zip(*blocks))
    return first, rest


def predicted(train: Any, labels: np.ndarray, tests: list[Any], is_regression: bool) -> list[np.ndarray]:
    model = Ridge() if is_regression else LogisticRegression(max_iter=1000)
    model.fit(train, labels)
    return [model.predict(test) for test in tests]


def baselines_of(name: str, arguments: BaselineArguments) -> dict[str, Any]:
    """Measures of both, for every seed and validation split."""
    task, splits = TASKS[name], load_task(name, arguments.data_folder)
    check_task(name, splits)
    validation = {split: splits[split] for split in task.validation if split in splits}
    runs = []
    for seed in arguments.seeds:
        train = splits["train"].shuffle(seed=seed)
        if arguments.max_train_rows is not None:
            train = train.select(range(min(arguments.max_train_rows, len(train))))
        labels, others = np.array(train["label"]), list(validation.values())
        inputs = {"bag of words": bags(train, others, task.columns)}
        if len(task.columns) == 2:
            inputs["word overlap"] = (
                overlaps(train, task.columns),
                [overlaps(rows, task.columns) for rows in others],
            )
        found: dict[str, Any] = {"seed": seed}
        for kind, (features, tests) in inputs.items():
            said = predicted(features, labels, tests, task.num_labels == 1)
            found[kind] = {
                split: measures_of(task, np.array(rows["label"]), values)
                for (split, rows), values in zip(validation.items(), said)
            }
        runs.append(found)
    return {"runs": runs}


def baselines(arguments: BaselineArguments) -> dict[str, Any]:
    figures: dict[str, Any] = {"settings": {key: asdict(arguments)[key] for key in ("max_train_rows", "seeds")}}
    figures["tasks"] = {name: baselines_of(name, arguments) for name in arguments.tasks}
    write_figures(figures, arguments.output_dir, arguments.results)
    say(table(figures))
    return figures


def table(figures: dict[str, Any]) -> str:
    lines = ["| task, measure | bag of words | word overlap |", "| --- | ---: | ---: |"]
    for name, found in figures["tasks"].items():
        for split in found["runs"][0]["bag of words"]:
            label = name if split == "validation" else f"{name} {split.removeprefix('validation_')}"
            cells = [mean_of(found["runs"], kind, split) for kind in ("bag of words", "word overlap")]
            lines.append(f"| {label}, {' / '.join(TASKS[name].measures)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_of(runs: list[dict[str, Any]], kind: str, split: str) -> str:
    """The measures' means over the seeds; nothing where there is no such baseline."""
    if kind not in runs[0]:
        return ""
    measures = runs[0][kind][split]
    return " / ".join(f"{statistics.mean(run[kind][split][measure] for run in runs):.1f}" for measure in measures)


if __name__ == "__main__":
    baselines(*read_settings("glue_baselines.py", (BaselineArguments,)))
