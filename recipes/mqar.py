"""Train and test multi-query associative recall.

Can a model look up what it has read (arXiv 2312.04927)?

    python recipes/mqar.py recipes/configs/mqar/cpu.yaml [key=value ...]

Trains every model at every length, width and learning rate of the settings with the first of the seeds, and at the
best of them, or at several `finalists`, with the others too; `options` are other ways to train, each tried at every
rate. Writes results.json and accuracy.png to `output_dir`. A sweep that was stopped goes on with the runs it lacks.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from _lib import peers  # noqa: F401 - registers mamba_native and llama_conv
from _lib.checks import check_config, check_least, check_named, difference_in_size, size_of
from _lib.entry import start
from _lib.plotting import measured_at, panels, style
from _lib.sweeps import check_claim, claim, once, settings_of
from _lib.training import Trainer, save_figure, say, write_figures

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from matplotlib.figure import Figure
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    PreTrainedConfig,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_hybrid_ssm.hub.configurations import new_config


@dataclass
class MqarArguments:
    """The sweep; the defaults are the benchmark's."""

    models: dict[str, dict[str, Any]] = field(
        metadata={
            "help": "name: fields of its configuration, `model_type` among them; torch_compile: true compiles, and "
            "times_width: {intermediate_size: 1.25} gives a field that grows with the width"
        }
    )
    settings: list[list[int]] = field(
        default_factory=lambda: [[64, 4], [128, 8], [256, 16], [512, 64]], metadata={"help": "[length, pairs]"}
    )
    widths: list[int] = field(default_factory=lambda: [64, 128, 256, 512])
    learning_rates: list[float] = field(default_factory=lambda: [1e-4, 4.64e-4, 2.15e-3, 1e-2])
    options: list[dict[str, Any]] = field(
        default_factory=lambda: [{}],
        metadata={"help": "training arguments that differ, each tried at every learning rate"},
    )
    seeds: list[int] = field(
        default_factory=lambda: [42],
        metadata={"help": "of weights and order; the first one finds the learning rate and the options"},
    )
    finalists: int = field(
        default=1,
        metadata={"help": "how many of the ways to train the other seeds try; the best on average counts"},
    )
    vocab_size: int = 8192
    train_rows: int = 100_000
    test_rows: int = 3_000
    mixed: bool = field(
        default=False,
        metadata={"help": "one model for all settings of a length, trained on rows of each, not one each"},
    )
    enough: float = field(default=0.99, metadata={"help": "test accuracy at which a run stops"})
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        check_named(self, "seeds", "learning_rates", "options")
        check_least(self, 1, "finalists")
        tried = {name for options in self.options for name in options}
        if unknown := sorted(tried - set(TrainingArguments.__dataclass_fields__)):
            raise ValueError(f"options: {unknown} are not training arguments.")
        for length, pairs in self.settings:
            check_sizes(length, pairs, self.vocab_size)
        for name, given in self.models.items():
            if "model_type" not in given:
                raise ValueError(f"models: {name!r} names no model_type.")
            check_config(given["model_type"], fields_of(given, width=1, vocab_size=self.vocab_size)[1])


def fields_of(given: dict[str, Any], width: int, vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The family and the fields of a model of `MqarArguments.models` at one width."""
    fields = {"vocab_size": vocab_size} | given
    fields.pop("torch_compile", None)
    scaled = fields.pop("times_width", {})
    return fields.pop("model_type"), fields | {"hidden_size": width} | {
        name: max(1, round(factor * width)) for name, factor in scaled.items()
    }


def check_sizes(length: int, pairs: int, vocab_size: int) -> None:
    if pairs < 1 or 4 * pairs > length:
        raise ValueError(f"pairs={pairs} must be at least 1 and at most length / 4 = {length // 4}.")
    if vocab_size // 2 <= pairs:
        raise ValueError(f"vocab_size={vocab_size} must be above twice pairs={pairs}.")


def recall_rows(length: int, pairs: int, rows: int, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Token rows and labels, (rows, length + 1) int64 each, as transformers' causal models take them.

    A row starts with key, value, key, value, ...; later every key comes once more, and the label after it is its
    value. Keys are the lower half of the vocabulary without 0, values the upper half, and 0 fills all else. The place
    of a query is drawn without replacement, near ones more often: p(j) ~ j^(0.01 - 1) over every second position.
    """
    check_sizes(length, pairs, vocab_size)
    random, half = np.random.default_rng(seed), vocab_size // 2
    places = (length - 2 * pairs) // 2
    weight = 0.01 * np.arange(1, places + 1) ** (0.01 - 1)
    weight /= weight.sum()
    tokens = np.zeros((rows, length + 1), dtype=np.int64)
    labels = np.full((rows, length + 1), -100, dtype=np.int64)
    for row in range(rows):
        keys = random.choice(np.arange(1, half), pairs, replace=False)
        values = random.choice(np.arange(half, vocab_size), pairs, replace=False)
        queries = 2 * pairs + 2 * random.choice(places, pairs, replace=False, p=weight)
        tokens[row, : 2 * pairs : 2], tokens[row, 1 : 2 * pairs : 2] = keys, values
        tokens[row, queries] = keys
        labels[row, queries + 1] = values
    return {"input_ids": tokens, "labels": labels}


class StopWhenSolved(TrainerCallback):
    """More epochs cannot tell models apart that have solved the task."""

    def __init__(self, enough: float):
        self.enough = enough

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        control.should_training_stop = metrics["eval_accuracy"] >= self.enough


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    asked = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[asked].mean())}


def data_of(length: int, pairs: list[int], arguments: MqarArguments) -> tuple[Dataset, dict[int, Dataset]]:
    """As many training rows of each number of pairs, and the test rows by pairs; fixed seeds."""

    def rows(number: int, several: int, seed: int) -> Dataset:
        return Dataset.from_dict(recall_rows(length, number, several // len(pairs), arguments.vocab_size, seed))

    train = concatenate_datasets([rows(number, arguments.train_rows, seed=0) for number in pairs])
    test = {number: rows(number, arguments.test_rows, seed=1).with_format("torch") for number in pairs}
    return train.with_format("torch"), test


def run(
    config: PreTrainedConfig,
    data: tuple[Dataset, dict[int, Dataset]],
    options: dict[str, Any],
    enough: float,
) -> dict[str, Any]:
    """Train one model; its best test accuracy, that after training by pairs, and what it took."""
    training = TrainingArguments(**options)
    set_seed(training.seed)
    model = AutoModelForCausalLM.from_config(config)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data[0],
        eval_dataset=concatenate_datasets(list(data[1].values())),
        data_collator=default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[StopWhenSolved(enough)],
    )
    seconds = trainer.train().metrics["train_runtime"]
    curve = [entry["eval_accuracy"] for entry in trainer.state.log_history if "eval_accuracy" in entry]
    by_pairs = {str(number): trainer.evaluate(rows)["eval_accuracy"] for number, rows in data[1].items()}
    return {
        "accuracy": max(curve),
        "accuracy_by_pairs": by_pairs,
        "epochs": len(curve),
        "seconds": round(seconds, 1),
        "parameters": model.num_parameters(),
    }


def groups(arguments: MqarArguments) -> list[tuple[int, list[int]]]:
    """(length, numbers of pairs) that a model is trained for."""
    if not arguments.mixed:
        return [(length, [pairs]) for length, pairs in arguments.settings]
    lengths = dict.fromkeys(length for length, _ in arguments.settings)
    return [(length, [pairs for found, pairs in arguments.settings if found == length]) for length in lengths]


def one_run(
    folder: Path,
    name: str,
    make: Callable[[dict[str, Any]], dict[str, Any]],
    settings: dict[str, Any],
    trial: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """What `make` returns of these settings, unless it is in the folder already."""
    options = "".join(f"-{name}={value}" for name, value in trial.items() if name != "learning_rate")
    path = folder / f"{name}-{trial['learning_rate']:g}{options}-{seed}.json"
    return once(path, partial(make, settings | trial | {"seed": seed}))


def best_trial(one: Callable[[dict[str, Any], int], dict[str, Any]], arguments: MqarArguments) -> dict[str, Any]:
    """All runs of a model: the first seed at every rate with all options, until one is enough; the others at the best,
    or at several finalists.

    Returns what is the same for all seeds at the best, the means of their accuracies, and `runs`.
    """
    first, *others = arguments.seeds
    tried: list[dict[str, Any]] = []
    for options, rate in product(arguments.options, arguments.learning_rates):
        trial = {"learning_rate": rate, **options}
        tried.append({"trial": trial, "seed": first, **one(trial, first)})
        if tried[-1]["accuracy"] >= arguments.enough:
            break
    ranked = sorted(tried, key=lambda found: -found["accuracy"])
    last = 1 if ranked[0]["accuracy"] >= arguments.enough else arguments.finalists
    finals = [
        [found, *({"trial": found["trial"], "seed": seed, **one(found["trial"], seed)} for seed in others)]
        for found in ranked[:last]
    ]
    same = max(finals, key=lambda several: statistics.mean(run["accuracy"] for run in several))
    return {
        "trial": same[0]["trial"],
        "parameters": same[0]["parameters"],
        "epochs": max(run["epochs"] for run in same),
        "accuracy": statistics.mean(run["accuracy"] for run in same),
        "accuracy_by_pairs": {
            pairs: statistics.mean(run["accuracy_by_pairs"][pairs] for run in same)
            for pairs in same[0]["accuracy_by_pairs"]
        },
        "runs": tried + [run for _, *more in finals for run in more],
    }


def sweep(arguments: MqarArguments, training: TrainingArguments) -> list[dict[str, Any]]:
    """The best way to train of every model, length and width."""
    settings = settings_of(arguments, training)
    if training.eval_strategy == "no":
        raise ValueError(
            'eval_strategy="no": the accuracy is measured while a model trains; give eval_strategy=epoch.'
        )
    check_claim(training.output_dir, settings, arguments.overwrite)
    configs = {}
    for width in arguments.widths:  # every model can be made, before the first one trains
        for name, fields in arguments.models.items():
            family, values = fields_of(fields, width, arguments.vocab_size)
            configs[name, width] = new_config(family, **values)
        if warning := difference_in_size({name: size_of(configs[name, width]) for name in arguments.models}):
            say(f"width {width}: {warning}")
    claim(training.output_dir, settings, arguments.overwrite, "*/*.json")
    results = []
    for length, several in groups(arguments):
        data, pairs = data_of(length, several, arguments), "+".join(map(str, several))
        for width in arguments.widths:
            for name, fields in arguments.models.items():
                given = training.to_dict() | {"torch_compile": fields.get("torch_compile", training.torch_compile)}
                folder = Path(training.output_dir) / f"{length}-{pairs}-{width}"
                make = partial(run, configs[name, width], data, enough=arguments.enough)
                found = best_trial(partial(one_run, folder, name, make, given), arguments)
                results.append({"model": name, "length": length, "pairs": several, "width": width, **found})
                say(results[-1])
                figures = {"torch": torch.__version__, "best": results}
                write_figures(figures, training.output_dir, arguments.results and f"{arguments.results}.json")
    for path in (Path(training.output_dir) / "accuracy", *filter(None, [arguments.results])):
        save_figure(draw(results), f"{path}.png")
    return results


def draw(results: list[dict[str, Any]]) -> Figure:
    """Accuracy by width, or for a single width by the number of pairs; one panel a length."""
    lengths = sorted({result["length"] for result in results})
    is_one_width = len({result["width"] for result in results}) == 1
    figure, row = panels(
        "How many pairs are recalled?" if is_one_width else "Which width recalls every pair?", len(lengths)
    )
    for axes, length in zip(row, lengths):
        there = [result for result in results if result["length"] == length]
        places: set[int] = set()
        for number, model in enumerate(dict.fromkeys(result["model"] for result in there)):
            points: list[tuple[int, float]] = []
            for found in (result for result in there if result["model"] == model):
                by_pairs = {int(pairs): share for pairs, share in found["accuracy_by_pairs"].items()}
                points += by_pairs.items() if is_one_width else [(found["width"], found["accuracy"])]
            at, shares = zip(*sorted(points))
            places |= set(at)
            axes.plot(at, [100 * share for share in shares], label=model, **style(number))
        measured_at(axes, sorted(places))
        axes.set(xlabel="pairs" if is_one_width else "width", ylabel="accuracy (%)", ylim=(-3, 103))
        axes.set_title(f"rows of {length} tokens", loc="left", fontsize=9)
    return figure


if __name__ == "__main__":
    start("mqar.py", sweep, MqarArguments, TrainingArguments)
