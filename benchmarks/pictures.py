"""Pictures that say one thing each, of figures that a table has whole."""

import json
from pathlib import Path

import numpy as np
from _lib.plotting import REFERENCE, measured_at, panels, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.table_text import load
from hf_hybrid_ssm.evaluation.intervals import wilson_interval
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import shared_answers

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
CACHE_LENGTH = "65536"
FAR = 1024
TRAINED_TO = 8192  # tokens that SmolLM2 read at once in its training
BYTES_OF_BFLOAT16 = 2
INTERVAL = {"color": "#000000", "capsize": 2, "linewidth": 1.2}
Rows = tuple[list[float], list[float], list[float]]
"""Shares, and how far their intervals reach below and above."""


def students() -> Figure:
    """Needles that a teacher and its students find, beside the bytes of their caches."""
    figures = load("upcycling_report")
    models = {
        f"{name}: {found['cache_bytes'][CACHE_LENGTH] / 2**20:,.0f} MiB": found["recall"]["recall_needle"]
        for name, found in figures["models"].items()
    }
    rows: dict[str, Rows] = {}
    for multiple in next(iter(models.values())):
        tokens = figures["settings"]["window"] * int(multiple.removesuffix("x"))
        cells = [found[multiple] for found in models.values()]
        shares = [cell["right"] / cell["count"] for cell in cells]
        lows = [share - cell["interval"][0] for share, cell in zip(shares, cells)]
        highs = [cell["interval"][1] - share for share, cell in zip(shares, cells)]
        rows[f"in {tokens:,} tokens"] = shares, lows, highs
    figure, (axes,) = panels(
        "What does a student recall, and what does its cache weigh?", height=1.4 + 0.45 * len(models)
    )
    grouped_bars(axes, list(models), rows)
    _as_bars(axes, f"needles found (%); MiB of cache at {int(CACHE_LENGTH):,} tokens")
    axes.set_xlim(0, 103)
    return figure


def kinds() -> Figure:
    """Facts of kinds that nothing was chosen by that students find, of those that their teacher finds, and caches."""
    found = {
        f"{name}: {model['cache_bytes'][CACHE_LENGTH] / 2**20:,.0f} MiB": model["answers"]
        for name, model in load("upcycling_kinds")["models"].items()
    }
    (teacher, own), *_ = found.items()
    rows: dict[str, Rows] = {}
    for length, its in own.items():
        counts = [shared_answers(answers[length], its) for answers in found.values()]
        shares = [right / count for right, count in counts]
        bounds = [(0, 0) if name == teacher else wilson_interval(*each) for name, each in zip(found, counts)]
        lows = [0 if name == teacher else share - low for name, share, (low, _) in zip(found, shares, bounds)]
        highs = [0 if name == teacher else high - share for name, share, (_, high) in zip(found, shares, bounds)]
        rows[f"in {int(length):,} tokens"] = shares, lows, highs
    title = "What does a student recall that it was not chosen by?"
    figure, (axes,) = panels(title, height=1.4 + 0.45 * len(found))
    grouped_bars(axes, list(found), rows)
    _as_bars(axes, f"of the facts that the teacher finds (%); MiB of cache at {int(CACHE_LENGTH):,} tokens")
    axes.set_xlim(0, 103)
    return figure


def kept_layers() -> Figure:
    """Needles by the bytes of the cache, a line for each way to choose the layers that keep full attention."""
    models = load("upcycling_grid_256")["models"]
    figure, (axes,) = panels("Which layers must keep full attention?")
    for number, (way, label) in enumerate(
        {"by recall": "by recall", "by kl": "by KL", "even": "evenly spaced"}.items()
    ):
        names = ["no layer", *(name for name in models if name.endswith(way))]
        cells = [models[name]["recall"]["recall_needle"] for name in names]
        needles = [next(iter(cell.values())) for cell in cells]
        shares = np.array([100 * needle["right"] / needle["count"] for needle in needles])
        bounds = 100 * np.array([needle["interval"] for needle in needles]).T
        bars = np.abs(np.stack([shares - bounds[0], bounds[1] - shares]))
        weights = [models[name]["cache_bytes"][CACHE_LENGTH] / 2**20 for name in names]
        axes.errorbar(weights, shares, yerr=bars, label=label, capsize=2, **style(number))
    axes.axhline(100, color=REFERENCE, linestyle=":", linewidth=1, label=f"teacher, {_teachers_mib(models):,.0f} MiB")
    axes.set(xlabel=f"MiB of cache at {int(CACHE_LENGTH):,} tokens", ylabel="needles found (%)", ylim=(-3, 106))
    return figure


def loss_by_position() -> Figure:
    """Loss of a teacher and its students by position, to beyond what the teacher was trained to read."""
    figures = load("upcycling_positions")
    figure, (axes,) = panels("How well is a long text predicted?")
    for number, (name, found) in enumerate(figures["models"].items()):
        losses = found["loss"]["mean"]
        ends = [int(part.partition("-")[2]) for part in losses]
        axes.plot(ends, list(losses.values()), label=name, **style(number))
    axes.axvline(TRAINED_TO, color=REFERENCE, linestyle=":", linewidth=1, label="the teacher's training")
    measured_at(axes, ends)
    axes.set(xlabel="text up to this token, from the mark before", ylabel="loss (nats)")
    return figure


def _teachers_mib(models: dict) -> float:
    return models["teacher"]["cache_bytes"][CACHE_LENGTH] / 2**20


def upcycling_controls() -> Figure:
    """Perplexity of students over that of a teacher of as many parameters that read as much."""
    differences = load("upcycling_controls")["differences"]
    names = {"half": "in half of the layers", "a quarter": "in a quarter", "no attention": "in none"}
    figure, (axes,) = panels("How far behind is a student?", height=2.4)
    means = np.array([differences[name]["mean"] for name in names])
    halves = np.array([differences[name]["half_width_of_95_percent"] for name in names])
    percent = 100 * (np.exp(means) - 1)
    bars = 100 * np.stack([np.exp(means) - np.exp(means - halves), np.exp(means + halves) - np.exp(means)])
    drawn = axes.barh(list(names.values()), percent, xerr=bars, color=style(0)["color"], error_kw=INTERVAL)
    axes.bar_label(drawn, labels=[f"{value:.1f} %" for value in percent], fontsize=8, padding=4)
    _as_bars(axes, "perplexity over the teacher's (%), by where attention is kept")
    return figure


def first_token(name: str) -> Figure:
    """Right answers where training asked, and eight times as far; a model a line."""
    figures = load(name)
    inside = str(max(at for at in figures["settings"]["distances"] if at < figures["settings"]["length"]))
    models = figures["models"]
    rows: dict[str, Rows] = {}
    for distance, asked in ((inside, ", as in training"), (str(FAR), "")):
        shares = [found["accuracy"][distance] for found in models.values()]
        halves = [found["half_width_of_95_percent"][distance] or 0.0 for found in models.values()]
        rows[f"{int(distance):,} tokens later{asked}"] = shares, halves, halves
    figure, (axes,) = panels("Which models still know the first token?", height=4.4)
    grouped_bars(axes, list(models), rows)
    axes.axvline(100 / figures["settings"]["answers"], color=REFERENCE, linestyle=":", linewidth=1, label="guessing")
    _as_bars(axes, "right answers (%)")
    axes.set_xlim(0, 103)
    return figure


def grouped_bars(axes: Axes, names: list[str], rows: dict[str, Rows]) -> None:
    """Bars of shares in percent with their intervals: a group for each name, in it a bar for each of the rows."""
    axes.yaxis.update_units(names)
    height = 0.8 / len(rows)
    for number, (label, (shares, lows, highs)) in enumerate(rows.items()):
        places = np.arange(len(names)) + height * (number - (len(rows) - 1) / 2)
        percent = 100 * np.array(shares)
        bars = np.stack([np.clip(100 * np.array(lows), 0, percent), np.clip(100 * np.array(highs), 0, 100 - percent)])
        axes.barh(places, percent, height, xerr=bars, color=style(number)["color"], error_kw=INTERVAL, label=label)


def llama_cache_megabytes(tokens: float) -> float:
    """Keys and values that the committed Llama would hold of so many tokens, in bfloat16."""
    config = json.loads((CHECKPOINTS / "llama-books/config.json").read_text(encoding="utf-8"))
    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return tokens * numbers * BYTES_OF_BFLOAT16 / 1e6


def streaming() -> Figure:
    """What memory a text adds: measured for the trained Longhorn, computed for the keys and values of its Llama."""
    found = load("streaming")["models"]["longhorn, trained, on text"]
    megabytes = np.array(found["resident_megabytes_by_stretch"])
    thousands = found["tokens"] / 1000 * np.arange(1, len(megabytes) + 1) / len(megabytes)
    figure, (axes,) = panels("What memory does a long text take?")
    axes.plot(thousands, megabytes - megabytes[0], label="longhorn-books, resident memory, measured", **style(0))
    cache = [llama_cache_megabytes(1000 * at) for at in thousands]
    label = "llama-books, keys and values, computed"
    axes.plot(thousands, cache, color=REFERENCE, linestyle="--", linewidth=1.4, label=label)
    axes.set(xlabel="tokens read (thousands)", ylabel="memory that the text adds (MB)")
    return figure


def _as_bars(axes: Axes, label: str) -> None:
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(label)
