"""Score GLUE by words alone, as a baseline.

A bag of words, and for pairs how many words the two texts share.

    python recipes/glue_baselines.py recipes/configs/glue/baselines.yaml [key=value ...]

Both read the training rows that finetune_glue.py reads with the same `max_train_rows` and seeds, on the same measures.
The bag counts words and pairs of neighbours (of the two texts of a pair apart), weighs them by tf-idf, and feeds a
linear model; the overlap is three numbers a pair (shared words over all, over the first text's, over the second's) and
as many coefficients. With `encoder`, a linear model also reads what that checkpoint makes of `probed` tasks without
any fine-tuning, averaged over the tokens: its embeddings, and its last states with and without a begin token. That
tells what pre-training gave from what fine-tuning spoils. Nothing is tuned. Writes results.json to `output_dir` and,
with `results`, to that file.
"""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from _lib.checks import check_known, check_named
from _lib.documents import begin_of, token_ids
from _lib.entry import start
from _lib.training import say, write_figures

import numpy as np
import torch
from datasets import Dataset
from finetune_glue import TASKS, check_task, load_task, measures_of
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler
from transformers import AutoModelForMaskedLM, AutoTokenizer

import hf_hybrid_ssm  # noqa: F401 - registers the families
from hf_hybrid_ssm.hub.whole_models import load_whole

WORDS = r"(?u)\b\w+\b|[!?]"


@dataclass
class BaselineArguments:
    """The tasks and their data."""

    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    data_folder: str | None = field(default=None, metadata={"help": "TASK/{train,validation}.jsonl; else the Hub"})
    max_train_rows: int | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "of the choice of training rows"})
    encoder: str | None = field(default=None, metadata={"help": "a checkpoint whose frozen states are read too"})
    probed: list[str] = field(default_factory=lambda: ["sst2"], metadata={"help": "by it; tasks of one text"})
    max_length: int = 128
    output_dir: str = "runs/glue-baselines"
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})

    def __post_init__(self):
        check_known("tasks", self.tasks, TASKS)
        if wrong := [name for name in self.probed if len(TASKS[name].columns) > 1] if self.encoder else []:
            raise ValueError(f"probed={wrong} are tasks of two texts.")
        check_named(self, "seeds")


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


@torch.no_grad()
def frozen_states(texts: list[str], arguments: BaselineArguments) -> dict[str, np.ndarray]:
    """Means over the tokens, (texts, width) each: of the embeddings, and of the last states."""
    assert arguments.encoder is not None
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    model = load_whole(AutoModelForMaskedLM, arguments.encoder, dtype=torch.float32).eval().base_model
    rows = [ids[: arguments.max_length] for ids in token_ids(texts, tokenizer)]
    found: dict[str, np.ndarray] = {}
    order = np.argsort([len(ids) for ids in rows])  # rows of like length in a batch
    for places in np.array_split(order, max(1, len(rows) // 64)):
        for begin in ([], [begin_of(tokenizer)]):
            several = tokenizer.pad({"input_ids": [begin + rows[place] for place in places]}, return_tensors="pt")
            several["attention_mask"] = (several["input_ids"] != tokenizer.pad_token_id).long()
            states = {"its states after a begin token": model(**several).last_hidden_state}
            if not begin:
                (without,) = states.values()
                embeddings = model.get_input_embeddings()(several["input_ids"])
                states = {"embeddings of the encoder": embeddings, "states of the encoder": without}
            weights = several["attention_mask"].float()
            weights[:, : len(begin)] = 0  # the mean is over the text
            for kind, each in states.items():
                mean = (each * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
                found.setdefault(kind, np.zeros((len(rows), each.shape[-1]), np.float32))[places] = mean.numpy()
    return found


def predicted(train: Any, labels: np.ndarray, tests: list[Any], is_regression: bool) -> list[np.ndarray]:
    penalty = 0.01 if isinstance(train, np.ndarray) and train.shape[1] > 3 else 1.0  # of dense states: more of it
    model = Ridge(alpha=1 / penalty) if is_regression else LogisticRegression(C=penalty, max_iter=1000)
    model.fit(train, labels)
    return [model.predict(test) for test in tests]


def baselines_of(name: str, arguments: BaselineArguments) -> dict[str, Any]:
    """Measures of both, for every seed and validation split."""
    task, splits = TASKS[name], load_task(name, arguments.data_folder)
    check_task(name, splits)
    validation = {split: splits[split] for split in task.validation if split in splits}
    frozen = {}
    if arguments.encoder is not None and name in arguments.probed:
        (column,) = task.columns
        frozen = {split: frozen_states(list(splits[split][column]), arguments) for split in ("train", *validation)}
    runs = []
    for seed in arguments.seeds:
        train = splits["train"].add_column("row", range(len(splits["train"]))).shuffle(seed=seed)
        if arguments.max_train_rows is not None:
            train = train.select(range(min(arguments.max_train_rows, len(train))))
        labels, others = np.array(train["label"]), list(validation.values())
        inputs = {"bag of words": bags(train, others, task.columns)}
        if len(task.columns) == 2:
            inputs["word overlap"] = (
                overlaps(train, task.columns),
                [overlaps(rows, task.columns) for rows in others],
            )
        for kind in frozen.get("train", ()):
            scale = StandardScaler().fit(frozen["train"][kind][train["row"]])
            rows_of = [frozen["train"][kind][train["row"]], *(frozen[split][kind] for split in validation)]
            first, *rest = map(scale.transform, rows_of)
            inputs[kind] = (first, rest)
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
    kinds = list(dict.fromkeys(kind for found in figures["tasks"].values() for kind in found["runs"][0]))[1:]
    lines = [f"| task, measure | {' | '.join(kinds)} |", f"| --- |{' ---: |' * len(kinds)}"]
    for name, found in figures["tasks"].items():
        for split in found["runs"][0]["bag of words"]:
            label = name if split == "validation" else f"{name} {split.removeprefix('validation_')}"
            cells = [mean_of(found["runs"], kind, split) for kind in kinds]
            lines.append(f"| {label}, {' / '.join(TASKS[name].measures)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_of(runs: list[dict[str, Any]], kind: str, split: str) -> str:
    """The measures' means over the seeds; nothing where there is no such baseline."""
    if kind not in runs[0]:
        return ""
    measures = runs[0][kind][split]
    return " / ".join(f"{statistics.mean(run[kind][split][measure] for run in runs):.1f}" for measure in measures)


if __name__ == "__main__":
    start("glue_baselines.py", baselines, BaselineArguments)
