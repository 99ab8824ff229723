"""Draws every picture of benchmarks/results from the figures beside it, without measuring anything.

python benchmarks/pictures.py                 # all, and the checkpoints'; `benchmarks/run.py` does so at its end
python benchmarks/pictures.py streaming ...   # some
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import compare
import length_extrapolation
import mqar
import numpy as np
import per_token_loss
import scaling_law
from _lib.plotting import REFERENCE, measured_at, panels, perplexity_by_length, style, write_png
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from publish_checkpoint import write_sums

from benchmarks.speed_tables import LONGHORN_AND_PEERS, by_kind
from benchmarks.table_text import RESULTS, load
from hf_hybrid_ssm.evaluation.intervals import wilson_interval
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import shared_answers

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
CACHE_LENGTH = "65536"
FAR = 1024
TRAINED_TO = 8192  # tokens that SmolLM2 read at once in its training
BYTES_OF_BFLOAT16 = 2
INTERVAL = {"color": "#000000", "capsize": 2, "linewidth": 1.2}
CURVES = (
    "the teacher, float32",
    "the teacher, bfloat16",
    "BST, windows of 256, float32",
    "BST, windows of 256, bfloat16",
    "Longhorn, six full layers, bfloat16",
    "llama.cpp, Q4_1",
    "llama.cpp, F16",
)
Share = tuple[float, tuple[float, float]]
"""A share, and the ends of its interval."""


def bars(
    title: str, rows: dict[str, dict[str, Share]], label: str, height: float | None = None
) -> tuple[Figure, Axes]:
    """Shares in percent with their intervals: what each row of bars is → name → share; a group for each name."""
    names = list(next(iter(rows.values())))
    figure, (axes,) = panels(title, height=height or 1.4 + 0.45 * len(names))
    axes.yaxis.update_units(names)
    thickness = 0.8 / len(rows)
    for number, (row, shares) in enumerate(rows.items()):
        places = np.arange(len(names)) + thickness * (number - (len(rows) - 1) / 2)
        percent = 100 * np.array([share for share, _ in shares.values()])
        ends = np.clip(100 * np.array([interval for _, interval in shares.values()]).T, 0, 100)
        errors = np.abs(ends - percent)
        axes.barh(places, percent, thickness, xerr=errors, color=style(number)["color"], error_kw=INTERVAL, label=row)
    _across(axes, label)
    axes.set_xlim(0, 103)
    return figure, axes


def _across(axes: Axes, label: str) -> None:
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(label)


def _mebibytes(found: dict) -> float:
    return found["cache_bytes"][CACHE_LENGTH] / 2**20


def _with_cache(models: dict) -> dict[str, dict]:
    """Models by their name and what their caches weigh."""
    return {f"{name}: {_mebibytes(found):,.0f} MiB": found for name, found in models.items()}


# -- speed ------------------------------------------------------------------------------------------------------------


def training() -> Figure:
    """Tokens/s of a training step of Longhorn and its peers."""
    step = load("longhorn_training")["training_step"]
    speeds = {LONGHORN_AND_PEERS[name].replace("`", ""): speed for name, speed in step["tokens_per_second"].items()}
    figure, (axes,) = panels("How fast does Longhorn train next to its peers?", height=2.4)
    drawn = axes.barh(list(speeds), list(speeds.values()), color=[style(n > 1)["color"] for n in range(len(speeds))])
    axes.bar_label(drawn, fmt="{:,.0f}", fontsize=8, padding=3)
    _across(axes, f"tokens per second, training step, L = {step['length']}, two threads")
    return figure


def long_context() -> Figure:
    """Time to write a token and to read a prompt, of few of the forms that the table has."""
    figure, row = panels("What does a long text cost on a CPU?", 2)
    for axes, kind, what in zip(row, ("write", "read"), ("milliseconds_per_token", "seconds")):
        found = by_kind(load("long_context"), kind)
        shown = [name for name in CURVES if name in found]
        for name in shown:
            times = {int(length): cell[what] for length, cell in found[name].items()}
            axes.plot(list(times), list(times.values()), label=name, **style(CURVES.index(name)))
        measured_at(axes, [int(length) for name in shown for length in found[name]])
        axes.set(yscale="log", xlabel="tokens")
    row[0].set(xlabel="tokens before", ylabel="writing a token (ms)")
    row[1].set(xlabel="tokens of the prompt", ylabel="reading it (s)")
    return figure


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


# -- models and students ----------------------------------------------------------------------------------------------


def first_token(name: str) -> Figure:
    """Right answers where training asked, and eight times as far; a model a line."""
    figures = load(name)
    inside = str(max(at for at in figures["settings"]["distances"] if at < figures["settings"]["length"]))
    rows: dict[str, dict[str, Share]] = {}
    for distance, asked in ((inside, ", as in training"), (str(FAR), "")):
        shares = rows[f"{int(distance):,} tokens later{asked}"] = {}
        for model, found in figures["models"].items():
            share, half = found["accuracy"][distance], found["half_width_of_95_percent"][distance] or 0.0
            shares[model] = share, (share - half, share + half)
    figure, axes = bars("Which models still know the first token?", rows, "right answers (%)", height=4.4)
    axes.axvline(100 / figures["settings"]["answers"], color=REFERENCE, linestyle=":", linewidth=1, label="guessing")
    return figure


def students() -> Figure:
    """Needles that a teacher and its students find, beside the bytes of their caches."""
    figures = load("upcycling_report")
    needles = {name: found["recall"]["recall_needle"] for name, found in _with_cache(figures["models"]).items()}
    rows = {}
    for multiple in next(iter(needles.values())):
        tokens = figures["settings"]["window"] * int(multiple.removesuffix("x"))
        cells = {name: found[multiple] for name, found in needles.items()}
        rows[f"in {tokens:,} tokens"] = {
            name: (cell["right"] / cell["count"], cell["interval"]) for name, cell in cells.items()
        }
    label = f"needles found (%); MiB of cache at {int(CACHE_LENGTH):,} tokens"
    return bars("What does a student recall, and what does its cache weigh?", rows, label)[0]


def kinds() -> Figure:
    """Facts of kinds that nothing was chosen by that students find, of those that their teacher finds, and caches."""
    models = _with_cache(load("upcycling_kinds")["models"])
    teacher, *_ = models
    rows: dict[str, dict[str, Share]] = {}
    for length, its in models[teacher]["answers"].items():
        shares = rows[f"in {int(length):,} tokens"] = {}
        for name, found in models.items():
            right, count = shared_answers(found["answers"][length], its)
            shares[name] = right / count, (1.0, 1.0) if name == teacher else wilson_interval(right, count)
    label = f"of the facts that the teacher finds (%); MiB of cache at {int(CACHE_LENGTH):,} tokens"
    return bars("What does a student recall that it was not chosen by?", rows, label)[0]


def kept_layers() -> Figure:
    """Needles by the bytes of the cache, a line for each way to choose the layers that keep full attention."""
    models = load("upcycling_grid_256")["models"]
    figure, (axes,) = panels("Which layers must keep full attention?")
    ways = {"by recall": "by recall", "by kl": "by KL", "even": "evenly spaced"}
    for number, (way, label) in enumerate(ways.items()):
        found = [models[name] for name in ("no layer", *(name for name in models if name.endswith(way)))]
        needles = [next(iter(each["recall"]["recall_needle"].values())) for each in found]
        shares = np.array([100 * needle["right"] / needle["count"] for needle in needles])
        errors = np.abs(100 * np.array([needle["interval"] for needle in needles]).T - shares)
        axes.errorbar([*map(_mebibytes, found)], shares, yerr=errors, label=label, capsize=2, **style(number))
    label = f"teacher, {_mebibytes(models['teacher']):,.0f} MiB"
    axes.axhline(100, color=REFERENCE, linestyle=":", linewidth=1, label=label)
    axes.set(xlabel=f"MiB of cache at {int(CACHE_LENGTH):,} tokens", ylabel="needles found (%)", ylim=(-3, 106))
    return figure


def loss_by_position() -> Figure:
    """Loss of a teacher and its students by position, to beyond what the teacher was trained to read."""
    figure, (axes,) = panels("How well is a long text predicted?")
    for number, (name, found) in enumerate(load("upcycling_positions")["models"].items()):
        losses = found["loss"]["mean"]
        ends = [int(part.partition("-")[2]) for part in losses]
        axes.plot(ends, list(losses.values()), label=name, **style(number))
    axes.axvline(TRAINED_TO, color=REFERENCE, linestyle=":", linewidth=1, label="the teacher's training")
    measured_at(axes, ends)
    axes.set(xlabel="text up to this token, from the mark before", ylabel="loss (nats)")
    return figure


def upcycling_controls() -> Figure:
    """Perplexity of students over that of a teacher of as many parameters that read as much."""
    differences = load("upcycling_controls")["differences"]
    names = {"half": "in half of the layers", "a quarter": "in a quarter", "no attention": "in none"}
    figure, (axes,) = panels("How far behind is a student?", height=2.4)
    means = np.array([differences[name]["mean"] for name in names])
    halves = np.array([differences[name]["half_width_of_95_percent"] for name in names])
    percent = 100 * (np.exp(means) - 1)
    errors = 100 * np.stack([np.exp(means) - np.exp(means - halves), np.exp(means + halves) - np.exp(means)])
    drawn = axes.barh(list(names.values()), percent, xerr=errors, color=style(0)["color"], error_kw=INTERVAL)
    axes.bar_label(drawn, labels=[f"{value:.1f} %" for value in percent], fontsize=8, padding=4)
    _across(axes, "perplexity over the teacher's (%), by where attention is kept")
    return figure


def draw_checkpoint(name: str) -> Figure:
    """Perplexity by length of a committed language model beside Llama's, on the scale of all of them."""
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(CHECKPOINTS.glob("*/results.json"))}
    curves = {
        model: [{"length": int(n), "perplexity": value} for n, value in each["perplexity_by_length"].items()]
        for model, each in found.items()
        if "perplexity_by_length" in each
    }
    values = [point["perplexity"] for points in curves.values() for point in points]
    shown = {model: curves[model] for model in dict.fromkeys((name, "llama-books"))}
    first, last = curves[name][0], curves[name][-1]
    finding = f"From {first['length']:,} to {last['length']:,} tokens {name} goes from perplexity "
    finding += f"{first['perplexity']:.1f} to {last['perplexity']:.1f}"
    size = f"{found[name]['parameters'] / 1e6:.1f} million parameters"
    figure = perplexity_by_length(f"{finding}\n{size}", shown, first["length"])
    figure.axes[0].set_ylim(0.95 * min(values), 1.05 * max(values))
    return figure


SOURCES = {"training": "longhorn_training"}  # of the others the name
FIGURES = {
    "training": training,
    "long_context": long_context,
    "bst_16k": lambda: length_extrapolation.draw(load("bst_16k")),
    "bst_books": lambda: length_extrapolation.draw(load("bst_books")),
    "checkpoints_length": lambda: length_extrapolation.draw(load("checkpoints_length")),
    "families_books": lambda: compare.draw(load("families_books")["models"]),
    "families_length": lambda: length_extrapolation.draw(load("families_length")),
    "first_token_recall": lambda: first_token("first_token_recall"),
    "first_token_noise": lambda: first_token("first_token_noise"),
    "mqar_families": lambda: mqar.draw(load("mqar_families")["best"]),
    "per_token_loss": lambda: per_token_loss.draw(load("per_token_loss")["models"]),
    "scaling_law_5m": lambda: scaling_law.draw(load("scaling_law_5m")["families"]),
    "streaming": streaming,
    "upcycling_controls": upcycling_controls,
    "upcycling_grid_256": kept_layers,
    "upcycling_kinds": kinds,
    "upcycling_positions": loss_by_position,
    "upcycling_report": students,
}


def drawn() -> list[str]:
    """All pictures but those whose figures were not measured yet."""
    return [name for name in FIGURES if (RESULTS / f"{SOURCES.get(name, name)}.json").is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(FIGURES)}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(FIGURES)):
        parser.error(f"{unknown} are not among {list(FIGURES)}")
    for name in arguments.names or drawn():
        write_png(FIGURES[name](), RESULTS / f"{name}.png")
    if not arguments.names:
        for path in sorted(CHECKPOINTS.glob("*/extrapolation.png")):
            write_png(draw_checkpoint(path.parent.name), path)
            write_sums(path.parent)


if __name__ == "__main__":
    main()
