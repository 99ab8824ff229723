"""Draws pictures of benchmarks/results from the figures beside them, and of the checkpoints; a recipe draws its own.

python benchmarks/pictures.py                    # all, and the checkpoints'; `benchmarks/run.py` does so at its end
python benchmarks/pictures.py long_context ...   # some
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import numpy as np
from _lib.plotting import measured_at, panels, perplexity_by_length, style, write_png
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from publish_checkpoint import write_sums

from benchmarks.speed_tables import by_kind
from benchmarks.table_text import RESULTS, load
from hf_hybrid_ssm.evaluation.intervals import wilson_interval
from hf_hybrid_ssm.evaluation.recall_tasks.kinds_table import shared_answers

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
CACHE_LENGTH = "65536"
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


FIGURES = {"long_context": long_context, "upcycling_kinds": kinds, "upcycling_report": students}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(FIGURES)}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(FIGURES)):
        parser.error(f"{unknown} are not among {list(FIGURES)}")
    for name in arguments.names or FIGURES:
        write_png(FIGURES[name](), RESULTS / f"{name}.png")
    if not arguments.names:
        for path in sorted(CHECKPOINTS.glob("*/extrapolation.png")):
            write_png(draw_checkpoint(path.parent.name), path)
            write_sums(path.parent)


if __name__ == "__main__":
    main()
