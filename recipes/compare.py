"""Compare the losses of models pre-trained on one text.

All read the same text with several seeds, and their validation losses are compared.

    python recipes/compare.py recipes/configs/compare/spade_books.yaml [key=value ...]

`base` holds settings of pretrain_clm.py, each of `variants` what differs. With `learning_rates`, each variant first
tries these for `search_steps` steps with the first seed, and keeps the best. Writes comparison.json (every run, mean
and standard deviation, with `reference` the paired differences to that variant or to its own of `references`, and
without `references` how many times as many tokens it needs for the same loss) and comparison.png (loss against tokens
and CPU time; both where runs were evaluated as they went) to `output_dir` and, with `results`, to that file and one
beside it. A comparison that was killed goes on with the runs it lacks.
"""

import json
import statistics
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib import paper_baselines, peers  # noqa: F401 - registers their model types
from _lib.checks import check_known, check_named, difference_in_size, size_of
from _lib.documents import DataArguments, paths_of
from _lib.entry import start
from _lib.intervals import half_width, mean_of, plus_minus, token_efficiencies
from _lib.plotting import panels, style
from _lib.settings import filled
from _lib.sweeps import check_claim, claim, once
from _lib.training import perplexity, say, write_json, write_with_picture

from matplotlib.figure import Figure
from pretrain_clm import ModelArguments, pretrain
from transformers import AutoConfig, TrainingArguments

from hf_hybrid_ssm.hub.configurations import new_config


@dataclass
class CompareArguments:
    """What to compare."""

    base: dict[str, Any] = field(metadata={"help": "settings of pretrain_clm.py"})
    variants: dict[str, dict[str, Any]] = field(metadata={"help": "name: settings that differ"})
    output_dir: str = "runs/compare"
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    only: list[str] = field(default_factory=list, metadata={"help": "variants to run now; all by default"})
    reference: str | None = field(default=None, metadata={"help": "the variant that differences are taken to"})
    references: dict[str, str] = field(
        default_factory=dict, metadata={"help": "variant: another one that its difference is taken to"}
    )
    learning_rates: list[float] = field(default_factory=list, metadata={"help": "to choose from, for each variant"})
    search_steps: int = field(default=0, metadata={"help": "of a run that tries a learning rate"})
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        if len(self.variants) < 2:
            raise ValueError(f"variants={list(self.variants)} must name at least two.")
        check_named(self, "seeds")
        check_known("only", self.only, self.variants)
        if self.reference is not None and self.reference not in (self.only or self.variants):
            named = f"only={self.only}" if self.only else f"variants={list(self.variants)}"
            raise ValueError(f"reference={self.reference!r} must be one of {named}.")
        check_known("references", self.references, self.variants)
        of_these = [to for name, to in self.references.items() if not self.only or name in self.only]
        check_known("references", of_these, self.only or self.variants)
        if self.references and (self.reference is None or self.reference in self.references):
            raise ValueError(f"references={self.references} needs a reference of the others, which has none itself.")
        if self.learning_rates and self.search_steps < 1:
            raise ValueError(f"learning_rates are tried for search_steps={self.search_steps}, which must be positive.")


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`; mappings are merged, all else replaced."""
    result = deepcopy(base)
    for key, value in over.items():
        is_mapping = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if is_mapping else value
    return result


def settings_of(arguments: CompareArguments) -> dict[str, Any]:
    kept = ("base", "variants", "learning_rates", "search_steps")
    return {name: getattr(arguments, name) for name in kept if getattr(arguments, name)}


def run(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of a run, which is made unless it was. The folder lies in one that was claimed."""
    return once(folder / "results.json", partial(pretrain, *parsed(folder, settings | {"overwrite": True})))


def parsed(folder: Path, settings: dict[str, Any]) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """The settings of a run of pretrain_clm.py.

    Raises:
        FileNotFoundError: a file with text is not there.
        ValueError: they are not such settings.
    """
    classes = (ModelArguments, DataArguments, TrainingArguments)
    model, data, training = filled(classes, settings | {"output_dir": str(folder)})
    paths_of([*data.train_files, *data.validation_files])
    return model, data, training


def planned_size(settings: dict[str, Any]) -> int:
    """The parameters of a variant's model beside the vocabulary's tables."""
    if settings.get("model_name_or_path") is not None:
        return size_of(AutoConfig.from_pretrained(settings["model_name_or_path"], trust_remote_code=False))
    return size_of(new_config(settings["model_type"], settings.get("preset"), **settings.get("config", {})))


def search(arguments: CompareArguments, name: str) -> dict[str, float]:
    """The validation loss of each learning rate."""
    settings = merged(arguments.base, arguments.variants[name]) | {"seed": arguments.seeds[0]}
    if not searches_whole_runs(arguments, settings):
        settings |= {"max_steps": arguments.search_steps, "eval_strategy": "no"}
    return {
        f"{rate:g}": run(rate_folder(arguments, name, rate), settings | {"learning_rate": rate})["validation_loss"]
        for rate in arguments.learning_rates
    }


def rate_folder(arguments: CompareArguments, name: str, rate: float) -> Path:
    return Path(arguments.output_dir) / f"{name}-rate-{rate:g}"


def searches_whole_runs(arguments: CompareArguments, settings: dict[str, Any]) -> bool:
    """Whether the first seed's runs of the search are those of the comparison."""
    return bool(arguments.learning_rates) and arguments.search_steps == settings.get("max_steps")


def compare(arguments: CompareArguments) -> dict[str, Any]:
    """All runs, seed by seed, so that an interrupted comparison is still fair."""
    check_claim(arguments.output_dir, settings_of(arguments), arguments.overwrite)
    names = arguments.only or list(arguments.variants)
    settings = {name: merged(arguments.base, arguments.variants[name]) for name in names}
    for name, each in settings.items():  # a wrong last one cannot cost the first one's hours
        parsed(Path(arguments.output_dir) / name, each)
    if warning := difference_in_size({name: planned_size(each) for name, each in settings.items()}):
        say(warning)
    claim(arguments.output_dir, settings_of(arguments), arguments.overwrite, "*/results.json")
    tried = {name: search(arguments, name) for name in settings if arguments.learning_rates}
    for name, losses in tried.items():
        settings[name]["learning_rate"] = float(min(losses, key=losses.__getitem__))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    figures: dict[str, Any] = {}
    for seed in arguments.seeds:
        for name, chosen in settings.items():
            folder = Path(arguments.output_dir) / f"{name}-{seed}"
            if seed == arguments.seeds[0] and searches_whole_runs(arguments, chosen):
                folder = rate_folder(arguments, name, chosen["learning_rate"])
            found = run(folder, chosen | {"seed": seed})
            runs[name].append({"seed": seed, **found, "curve": curve_of(folder, found)})
            figures = {"settings": settings_of(arguments)}
            if tried:
                figures["learning_rates"] = tried
            figures["models"] = {name: summary(found) for name, found in runs.items() if found}
            if arguments.reference is not None:
                figures["reference"] = arguments.reference
                if arguments.references:
                    figures["references"] = arguments.references
                figures["differences"] = differences(runs, arguments.reference, arguments.references)
                if not arguments.references:
                    figures["token_efficiency"] = efficiencies(runs, arguments.reference)
            write_json(Path(arguments.output_dir) / "comparison.json", figures)
    has_curves = any(run["curve"] for found in runs.values() for run in found)
    picture = partial(draw, figures["models"]) if has_curves else None
    write_with_picture(figures, picture, Path(arguments.output_dir) / "comparison", arguments.results)
    say(table(figures))
    return figures


def curve_of(folder: Path, results: dict[str, Any]) -> list[dict[str, float]]:
    """Validation loss against tokens and CPU time, which is spread evenly over the steps."""
    history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    entries = [entry for entry in history if "eval_loss" in entry]
    done = [(entry["step"] / results["steps"], entry["eval_loss"]) for entry in entries]
    return [
        {"tokens": round(part * results["tokens"]), "cpu_seconds": round(part * results["cpu_seconds"]), "loss": loss}
        for part, loss in dict(done).items()
    ]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [run["validation_loss"] for run in runs]
    return {
        "validation_loss": statistics.mean(losses),
        "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "validation_perplexity": perplexity(statistics.mean(losses)),
        "parameters": runs[0]["parameters"],
        "runs": runs,
    }


def differences(
    runs: dict[str, list[dict[str, Any]]], reference: str, own: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Loss minus the reference's of the same seed: the mean, and half the width of its 95 % interval (Student's t).
    `own` names the variants that have another reference, which has no difference itself."""
    found = {}
    for name, others in runs.items():
        base = {run["seed"]: run["validation_loss"] for run in runs.get((own or {}).get(name, reference), [])}
        pairs = [run["validation_loss"] - base[run["seed"]] for run in others if run["seed"] in base]
        if name == reference or name in (own or {}).values() or not pairs:
            continue
        found[name] = mean_of(pairs) | {"pairs": len(pairs)}
    return found


def efficiencies(runs: dict[str, list[dict[str, Any]]], reference: str) -> dict[str, Any]:
    """How many times as many tokens the reference needs for the same loss as each variant that says so."""
    others = {name: token_efficiencies(found, runs[reference]) for name, found in runs.items() if name != reference}
    return {name: found for name, found in others.items() if found is not None}


def table(figures: dict[str, Any]) -> str:
    compared = figures.get("differences", {})
    lines = ["| model | parameters | validation loss, 95 % | perplexity |", "| --- | ---: | ---: | ---: |"]
    if compared:
        base = "its reference" if "references" in figures else figures["reference"]
        lines = [f"{lines[0]} minus {base}'s loss, 95 % |", f"{lines[1]} ---: |"]
    for name, found in figures["models"].items():
        half = half_width([run["validation_loss"] for run in found["runs"]])
        loss = f"{found['validation_loss']:.4f}{plus_minus(half, 4)}"
        line = f"| {name} | {found['parameters']:,} | {loss} | {found['validation_perplexity']:.2f} |"
        lines.append(line + (f" {_difference(compared.get(name))} |" if compared else ""))
    return "\n".join(lines)


def _difference(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    return f"{found['mean']:+.4f}{plus_minus(found['half_width_of_95_percent'], 4)}"


def draw(models: dict[str, Any]) -> Figure:
    """The mean curve of each model, against tokens and against CPU time."""
    figure, axes = panels("Which model learns most from the same tokens, and in the same time?", 2)
    for number, (name, found) in enumerate(models.items()):
        points = list(zip(*(run["curve"] for run in found["runs"])))
        losses = [statistics.mean(point["loss"] for point in same) for same in points]
        for place, key in zip(axes, ("tokens", "cpu_seconds")):
            at = [statistics.mean(point[key] for point in same) for same in points]
            scale = 1e6 if key == "tokens" else 60
            place.plot(
                [value / scale for value in at], losses, label=name if key == "tokens" else None, **style(number)
            )
    for place, label in zip(axes, ("million tokens", "minutes of CPU time")):
        place.set(xlabel=label, ylabel="validation loss (nats per token)")
    return figure


if __name__ == "__main__":
    start("compare.py", compare, CompareArguments)
