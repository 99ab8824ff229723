"""Tables of loss and recall, each from the figures of one file of results.

Those of experiments that were made once stand on their pages as they were written.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

from _lib.intervals import half_width, half_width_of, plus_minus, token_efficiencies

from benchmarks.table_text import markdown_table, mebibytes, rows_of
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import kinds_table

Figures = dict[str, Any]
# of compared models, those that the text sets against each other
PAIRS = (
    ("SPADE", "SPADE without its SSM"),
    ("BST", "sliding attention"),
    ("Longhorn", "Longhorn without its convolution"),
    ("Longhorn", "Mamba, its own code's initial values"),
    ("Llama with the convolution", "Llama"),
    ("Llama with the convolution", "Longhorn"),
    ("frozen S4", "window attention"),
    ("S5", "window attention"),
    ("S4, all trained", "frozen S4"),
    ("S5", "S4, all trained"),
    ("S5 in the middle", "S5 at the bottom"),
    ("S5 on top", "S5 at the bottom"),
    ("SH, layer 5", "SH, layer 1"),
    ("SH, layers 1 and 3", "SH, layer 3"),
    ("SH, layer 3, state of 128", "SH, layer 3, state of 4"),
    ("LMU-ISA with attention", "LMU-ISA"),
    ("LMU-ISA", "LSTM, three layers of LMU-ISA's width"),
)


def mean(values: Sequence[float], digits: int, sign: str = "") -> str:
    """With half the 95 % interval where there are several values; `sign` "+" for a difference."""
    return f"{statistics.mean(values):{sign}.{digits}f}{plus_minus(half_width(values), digits)}"


def paired(values: Sequence[float], others: Sequence[float], digits: int = 3, *, by_seed: bool = False) -> str:
    """The mean difference with its interval; seed by seed in brackets."""
    pairs = [one - other for one, other in zip(values, others)]
    added = f" ({', '.join(f'{pair:+.{digits}f}' for pair in pairs)})" if by_seed else ""
    return mean(pairs, digits, "+") + added


def _losses(found: Figures) -> list[float]:
    return [run["validation_loss"] for run in found["runs"]]


def compared(figures: Figures) -> str:
    """Best first, with the paired differences to the reference and, of runs that were evaluated as they went, how many
    times as many tokens the reference needs for the same loss; below, those within `PAIRS`."""
    models, reference, searched = figures["models"], figures["reference"], figures.get("learning_rates")
    tokens = {name: token_efficiencies(found["runs"], models[reference]["runs"]) for name, found in models.items()}
    says_tokens = any(found is not None for found in tokens.values())
    rows = []
    for name, found in sorted(models.items(), key=lambda pair: pair[1]["validation_loss"]):
        apart = figures["differences"].get(name)
        minutes = statistics.mean(run["cpu_seconds"] for run in found["runs"]) / 60
        rows.append([
            name, f"{found['runs'][0]['parameters_beside_embeddings']:,}",
            *([min(searched[name], key=searched[name].__getitem__)] if searched else []),
            mean(_losses(found), 3), difference(apart) if apart else "",
            *([_times(tokens[name]) if apart else ""] if says_tokens else []), f"{minutes:.1f}",
        ])  # fmt: skip
    head = ["model", "non-embedding parameters", *(["learning rate, best by this loss"] if searched else [])]
    head += ["held-out loss, nats per token, 95 %", f"minus {reference}'s, 95 %"]
    head += [f"tokens {reference} needs over its own, 95 %"] if says_tokens else []
    notes = [
        f"{name} minus {without}: {paired(_losses(models[name]), _losses(models[without]), by_seed=True)}"
        for name, without in PAIRS
        if name in models and without in models
    ]
    return _with_pairs(markdown_table([*head, "minutes of CPU time"], rows), notes)


def _with_pairs(table: str, notes: list[str]) -> str:
    return f"{table}\nPaired, and seed by seed: {'; '.join(notes)}.\n" if notes else table


def difference(found: Figures) -> str:
    return f"{found['mean']:+.3f}{plus_minus(found['half_width_of_95_percent'], 3)}"


def _times(found: Figures | None) -> str:
    return "" if found is None else "{:.2f} ({:.2f} to {:.2f})".format(found["mean"], *found["interval_of_95_percent"])


def lengths(figures: Figures) -> str:
    rows = []
    for name, model in figures["models"].items():
        row = [name]
        for point in model["points"]:
            half = half_width_of(point["standard_deviation_of_loss"], model["checkpoints"])
            row.append(f"{point['perplexity']:.2f}{plus_minus(half and point['perplexity'] * half, 2)}")
        rows.append(row)
    head = [f"{point['length']:,}" for point in next(iter(figures["models"].values()))["points"]]
    return markdown_table(["perplexity on held-out books, 95 %, by evaluation context length", *head], rows)


def _needles(figures: Figures) -> tuple[list[str], list[str]]:
    """Heads and columns of needles right with Wilson's intervals, for texts of each length."""
    settings = figures["settings"]
    heads = [f"needles of {settings['samples']} in {tokens} tokens, 95 %" for tokens in _texts(settings)]
    found = (f"recall[recall_needle][{multiple}x]" for multiple in settings["multiples"])
    return heads, [f"{{{at}[right]}} ({{{at}[interval][0]:.0%}} to {{{at}[interval][1]:.0%}})" for at in found]


def _texts(settings: Figures) -> list[str]:
    return [f"{multiple * settings['window']:,}" for multiple in settings["multiples"]]


def _cache(tokens: int) -> Any:
    return lambda found: mebibytes(found["cache_bytes"][str(tokens)])


def _parts_of_loss(models: Figures) -> list[str]:
    """The last two stretches of positions, where loss was asked for."""
    return list(models["teacher"].get("loss", {"mean": ()})["mean"])[-2:]


def _losses_at(parts: list[str]) -> tuple[list[str], list[str]]:
    """Heads and columns."""
    heads = [f"loss, tokens {part.replace('-', ' to ')}" for part in parts]
    return heads, [f"{{loss[mean][{part}]:.3f}}" for part in parts]


def upcycling_report(figures: Figures) -> str:
    """Needles right, loss by position where it was asked for, and the cache."""
    models = figures["models"]
    (needles, right), (losses, lost) = _needles(figures), _losses_at(_parts_of_loss(models))
    head = ["model", *needles, *losses, "cache at 4,096, MiB", "at 65,536"]
    return markdown_table(head, rows_of(models, *right, *lost, _cache(4096), _cache(65536)))


def upcycling_kinds(figures: Figures) -> str:
    """Answers about facts of many kinds with Wilson's intervals, loss where it was asked for, and the cache."""
    models = figures["models"]
    answers = {
        name: {int(length): each for length, each in found["answers"].items()} for name, found in models.items()
    }
    table, (losses, lost) = kinds_table(answers), _losses_at(_parts_of_loss(models))
    narrow = 1 + 2 * len(answers["teacher"])  # without a column for each kind
    more = rows_of(models, *lost, _cache(65536))
    rows = [[*row[:narrow], *beside] for row, (_, *beside) in zip(table.rows, more, strict=True)]
    return markdown_table([*table.columns[:narrow], *losses, "cache at 65,536, MiB"], rows)
