"""Test recall of a row's first token beyond the windows.

Only the long-range mechanism can know it: the token is asked for again far outside of the windows.

    python recipes/first_token_recall.py recipes/configs/recall/short.yaml [key=value ...]

A row is one of `answers` tokens and then fillers; in some places stands a question token instead, where the model must
name the row's first token. No answer is ever part of the input, so no question helps with another one. Rows come in
groups that differ in their first token alone, one of each, so that only what remembers it lowers the loss. Every model
is trained at the best of `learning_rates` (tried with the first seed), once for each seed, and tested at every one of
`distances`. Writes results.json and accuracy.png to `output_dir` and, with `results`, beside that path. A sweep that
was stopped goes on with the runs it lacks.
"""

import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib import peers  # noqa: F401 - registers mamba_native
from _lib.checks import check_known, check_least, check_named
from _lib.entry import start
from _lib.intervals import half_width
from _lib.plotting import REFERENCE, measured_at, panels, style
from _lib.sweeps import claim, once, settings_of
from _lib.training import Trainer, save_figure, say, write_figures

import numpy as np
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import hf_hybrid_ssm  # noqa: F401 - registers the families

TEST_SEED = 10_000  # of rows that no training seed draws


@dataclass
class RecallArguments:
    """The sweep."""

    models: dict[str, dict[str, Any]] = field(
        metadata={"help": "name: fields of its configuration, `model_type` among them"}
    )
    groups: dict[str, list[str]] = field(
        default_factory=dict, metadata={"help": "panels of the picture: title: names of models; one of all by default"}
    )
    config: dict[str, Any] = field(default_factory=dict, metadata={"help": "fields that all models share"})
    answers: int = field(default=16, metadata={"help": "tokens that a row may begin with; a batch has some of each"})
    fillers: int = field(default=1, metadata={"help": "tokens to draw the rest of a row from; more than 1 are noise"})
    length: int = field(default=128, metadata={"help": "tokens of a training row"})
    nearest: int = field(default=17, metadata={"help": "the smallest distance of a training question"})
    questions: int = field(default=16, metadata={"help": "of a training row, at places drawn evenly in the logarithm"})
    distances: list[int] = field(default_factory=lambda: [40, 64, 125, 256, 512, 1024, 2048, 4096])
    test_rows: int = 128
    test_batch: int = 16
    learning_rates: list[float] = field(default_factory=lambda: [3e-3, 1e-2])
    only: list[str] = field(default_factory=list, metadata={"help": "models to train now; all by default"})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2, 3, 4])
    enough: float = field(default=0.01, metadata={"help": "training loss at which a run stops: the task is solved"})
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        if not 1 <= self.nearest < self.length:
            raise ValueError(f"nearest={self.nearest} must be at least 1 and below length={self.length}.")
        if not 1 <= self.questions <= self.length - self.nearest:
            raise ValueError(
                f"questions={self.questions} must be at least 1 and at most length - nearest = "
                f"{self.length - self.nearest}."
            )
        check_least(self, 1, "answers", "fillers", "test_rows", "test_batch")
        check_named(self, "distances", "learning_rates", "seeds", "models")
        if min(self.distances) < 1:
            raise ValueError(f"distances={self.distances} must each be at least 1.")
        check_known("groups", (name for names in self.groups.values() for name in names), self.models)
        check_known("only", self.only, self.models)

    @property
    def vocab_size(self) -> int:
        """The answers, the fillers, and the question token, which is the last."""
        return self.answers + self.fillers + 1


def filled_rows(arguments: RecallArguments, length: int, rows: int, random: np.random.Generator) -> np.ndarray:
    """(rows, length) int64: an answer, each in its turn, then fillers, the same ones in a row of each answer."""
    groups = -(-rows // arguments.answers)
    fillers = random.integers(arguments.answers, arguments.vocab_size - 1, (groups, length))
    tokens = fillers.repeat(arguments.answers, axis=0)
    tokens[:, 0] = np.tile(np.arange(arguments.answers), groups)
    return tokens[:rows]


def training_rows(arguments: RecallArguments, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Token rows and labels, (rows, length + 1) int64 each, as transformers' causal models take them: the label after
    a question is the row's first token, but the token after it is a filler."""
    random = np.random.default_rng(seed)
    tokens = filled_rows(arguments, arguments.length + 1, rows, random)
    labels = np.full_like(tokens, -100)
    places = np.arange(arguments.nearest, arguments.length)
    near = (1 / places) / (1 / places).sum()  # even in the logarithm of the distance
    for group in range(0, rows, arguments.answers):
        asked = random.choice(places, arguments.questions, replace=False, p=near)
        tokens[group : group + arguments.answers, asked] = arguments.vocab_size - 1
        labels[group : group + arguments.answers, asked + 1] = tokens[group : group + arguments.answers, :1]
    return {"input_ids": tokens, "labels": labels}


class StopWhenSolved(TrainerCallback):
    """What is known cannot be learnt better."""

    def __init__(self, enough: float):
        self.enough = enough

    def on_log(self, args, state, control, logs=None, **kwargs):
        control.should_training_stop |= (logs or {}).get("loss", self.enough) < self.enough


@torch.no_grad()
def accuracy_by_distance(model: PreTrainedModel, arguments: RecallArguments) -> dict[str, float]:
    """The share of rows whose first token the model names (among all tokens) at each distance; one forward for all."""
    random = np.random.default_rng(TEST_SEED)
    tokens = filled_rows(arguments, max(arguments.distances) + 1, arguments.test_rows, random)
    for group in range(0, len(tokens), arguments.answers):  # more questions, so that groups differ
        more = np.exp(random.uniform(np.log(arguments.nearest), np.log(tokens.shape[1]), arguments.questions))
        tokens[group : group + arguments.answers, more.astype(int)] = arguments.vocab_size - 1
    tokens[:, arguments.distances] = arguments.vocab_size - 1
    model.eval()
    found = []
    for rows in torch.from_numpy(tokens).to(model.device).split(arguments.test_batch):
        keep = torch.tensor(arguments.distances, device=model.device)
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=keep).logits
        found.append((logits.argmax(-1) == rows[:, :1]).float())
    shares = torch.cat(found).mean(0).tolist()
    return {str(distance): share for distance, share in zip(arguments.distances, shares)}


def run(fields: dict[str, Any], options: dict[str, Any], arguments: RecallArguments) -> dict[str, Any]:
    """Train one model, and test it."""
    training = TrainingArguments(**options | {"train_sampling_strategy": "sequential"})  # groups stay together
    if training.train_batch_size % arguments.answers:
        raise ValueError(f"a batch of {training.train_batch_size} rows must hold answers={arguments.answers} alike.")
    set_seed(training.seed)
    fields = {"vocab_size": arguments.vocab_size} | arguments.config | fields
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    rows = training.max_steps * training.train_batch_size
    data = Dataset.from_dict(training_rows(arguments, rows, training.seed)).with_format("torch")
    trainer = Trainer(model=model, args=training, train_dataset=data, data_collator=default_data_collator)
    trainer.add_callback(StopWhenSolved(arguments.enough))
    begin = time.process_time()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = time.process_time()
    shares = accuracy_by_distance(trainer.model, arguments)
    return {
        "accuracy": shares,
        "training_losses": losses,
        "steps": trainer.state.global_step,
        "parameters": model.num_parameters(),
        "cpu_seconds": round(trained - begin, 1),
        "test_cpu_seconds": round(time.process_time() - trained, 1),
    }


def within(shares: dict[str, float], arguments: RecallArguments) -> float:
    """The mean accuracy at the distances of training, by which the learning rate is chosen."""
    inside = [share for distance, share in shares.items() if int(distance) < arguments.length]
    return statistics.mean(inside or shares.values())


def sweep(arguments: RecallArguments, training: TrainingArguments) -> dict[str, Any]:
    """Every model at its best learning rate, seed by seed. Models and seeds may be added to a sweep that has run."""
    kept = settings_of(arguments, without=("models", "groups", "seeds", "only", "learning_rates"))
    options, folder = training.to_dict(), Path(training.output_dir)
    names = arguments.only or list(arguments.models)
    for name in names:
        fields = {"model": arguments.models[name], **kept, **settings_of(None, training)}
        claim(folder / name, fields, arguments.overwrite, "*-*.json")

    def result(name: str, rate: float, seed: int) -> dict[str, Any]:
        given = options | {"learning_rate": rate, "seed": seed}
        path = folder / name / f"{rate:g}-{seed}.json"
        return once(path, partial(run, dict(arguments.models[name]), given, arguments))

    figures: dict[str, Any] = {}
    rates: dict[str, float] = {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in arguments.seeds:
        for name in names:
            if name not in rates:
                tried = {rate: result(name, rate, seed)["accuracy"] for rate in arguments.learning_rates}
                rates[name] = max(tried, key=lambda rate: within(tried[rate], arguments))
            runs[name].append({"seed": seed, **result(name, rates[name], seed)})
        figures = {"settings": {**kept, "steps": training.max_steps, "batch_size": training.train_batch_size}}
        figures["models"] = {name: {"learning_rate": rates[name], **summary(found)} for name, found in runs.items()}
        write_figures(figures, folder, arguments.results and f"{arguments.results}.json")
        say(table(figures))
    for path in (folder / "accuracy", *filter(None, [arguments.results])):
        save_figure(draw(figures, arguments.groups), f"{path}.png")
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean accuracy over seeds at each distance, and half the width of its 95 % interval (Student's t)."""
    shares = {distance: [run["accuracy"][distance] for run in runs] for distance in runs[0]["accuracy"]}
    half = {distance: half_width(found) for distance, found in shares.items()}
    means = {distance: statistics.mean(found) for distance, found in shares.items()}
    return {"accuracy": means, "half_width_of_95_percent": half, "runs": runs}


def table(figures: dict[str, Any]) -> str:
    distances = next(iter(figures["models"].values()))["accuracy"]
    lines = [f"| tokens between | {' | '.join(distances)} |", f"| --- |{' ---: |' * len(distances)}"]
    for name, found in figures["models"].items():
        lines.append(f"| {name} | {' | '.join(f'{100 * share:.1f}' for share in found['accuracy'].values())} |")
    return "\n".join(lines)


def draw(figures: dict[str, Any], groups: dict[str, list[str]]) -> Figure:
    """Accuracy by distance with 95 % intervals over seeds; the same limits in every panel."""
    settings, models = figures["settings"], figures["models"]
    groups = groups or {"": list(models)}
    groups = {title: [name for name in names if name in models] for title, names in groups.items()}
    groups = {title: names for title, names in groups.items() if names}  # of a sweep with `only`
    figure, row = panels("Which models still know the first token?", len(groups), height=4.0)
    for axes, (title, names) in zip(row, groups.items()):
        for number, name in enumerate(names):
            found = models[name]
            at = [int(distance) for distance in found["accuracy"]]
            shares = 100 * np.array(list(found["accuracy"].values()))
            half = 100 * np.array([value or 0.0 for value in found["half_width_of_95_percent"].values()])
            bars = np.stack([np.minimum(half, shares), np.minimum(half, 100 - shares)])
            axes.errorbar(at, shares, bars, label=name, capsize=2, **style(number))
        axes.axhline(100 / settings["answers"], color=REFERENCE, linestyle=":", linewidth=1, label="guessing")
        axes.axvline(settings["length"], color=REFERENCE, linestyle="--", linewidth=1, label="length of training")
        measured_at(axes, settings["distances"])
        axes.set(xlabel="tokens since the first", ylabel="right answers (%)", ylim=(-3, 103))
        axes.set_title(title, loc="left", fontsize=9)
    return figure


if __name__ == "__main__":
    start("first_token_recall.py", sweep, RecallArguments, TrainingArguments)
