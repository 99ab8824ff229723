"""Pre-train several models on the same text with several seeds and compare their validation loss.

    python recipes/compare.py recipes/configs/compare/spade_books.yaml [key=value ...]

`base` holds settings of pretrain_clm.py, each of `variants` what differs. Writes comparison.json (every run, mean and
standard deviation) to `output_dir` and, with `results`, to that file too.
"""

import statistics
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _lib.checks import check_output
from _lib.documents import DataArguments
from _lib.settings import read_settings
from _lib.training import perplexity, say, write_json, write_results
from pretrain_clm import ModelArguments, pretrain
from transformers import HfArgumentParser, TrainingArguments


@dataclass
class CompareArguments:
    """What to compare."""

    base: dict[str, Any] = field(metadata={"help": "settings of pretrain_clm.py"})
    variants: dict[str, dict[str, Any]] = field(metadata={"help": "name: settings that differ"})
    output_dir: str = "runs/compare"
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    results: str | None = field(default=None, metadata={"help": "another file for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        if len(self.variants) < 2:
            raise ValueError(f"variants={list(self.variants)} must name at least two.")
        if not self.seeds:
            raise ValueError("seeds=[] must name at least one.")


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`; mappings are merged, all else replaced."""
    result = deepcopy(base)
    for key, value in over.items():
        is_mapping = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if is_mapping else value
    return result


def compare(arguments: CompareArguments) -> dict[str, Any]:
    """All runs, seed by seed, so that an interrupted comparison is still fair."""
    check_output(arguments.output_dir, arguments.overwrite)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.variants}
    figures: dict[str, Any] = {}
    for seed in arguments.seeds:
        for name, over in arguments.variants.items():
            folder = Path(arguments.output_dir) / f"{name}-{seed}"
            settings = merged(arguments.base, over) | {"seed": seed, "output_dir": str(folder)} | {"overwrite": True}
            parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
            runs[name].append({"seed": seed, **pretrain(*parser.parse_dict(settings))})
            figures = {"settings": {"base": arguments.base, "variants": arguments.variants}}
            figures["models"] = {name: summary(found) for name, found in runs.items() if found}
            write_json(Path(arguments.output_dir) / "comparison.json", figures)
    if arguments.results is not None:
        write_results(arguments.results, figures)
    say(table(figures["models"]))
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [run["validation_loss"] for run in runs]
    return {
        "validation_loss": statistics.mean(losses),
        "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "validation_perplexity": perplexity(statistics.mean(losses)),
        "parameters": runs[0]["parameters"],
        "runs": runs,
    }


def table(models: dict[str, Any]) -> str:
    lines = ["| model | parameters | validation loss | perplexity |", "| --- | ---: | ---: | ---: |"]
    for name, found in models.items():
        spread = "" if found["standard_deviation"] is None else f" ± {found['standard_deviation']:.4f}"
        loss = f"{found['validation_loss']:.4f}{spread}"
        lines.append(f"| {name} | {found['parameters']:,} | {loss} | {found['validation_perplexity']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    compare(*read_settings("compare.py", (CompareArguments,)))
