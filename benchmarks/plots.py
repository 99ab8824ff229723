"""Draws every picture of benchmarks/results from the figures beside it, without measuring anything.

python benchmarks/plots.py                 # all of them, and the checkpoints'; `benchmarks/run.py` does so at its end
python benchmarks/plots.py streaming ...   # some
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
import per_token_loss
import scaling_law
from _lib.plotting import measured_at, panels, perplexity_by_length, style, write_png
from matplotlib.figure import Figure
from publish_checkpoint import write_sums

from benchmarks import pictures
from benchmarks.long_context_table import label, rows_of
from benchmarks.table_text import RESULTS, load
from benchmarks.tables import LONGHORN_AND_PEERS

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
CURVES = (
    ("teacher", "float32"),
    ("teacher", "bfloat16"),
    ("bst-256", "float32"),
    ("bst-256", "bfloat16"),
    ("longhorn", "bfloat16"),
    ("llama.cpp", "as given"),
    ("llama.cpp", "F16"),
)


def training() -> Figure:
    """Tokens/s of a training step of Longhorn and its peers."""
    step = load("longhorn_training")["training_step"]
    speeds = {LONGHORN_AND_PEERS[name].replace("`", ""): speed for name, speed in step["tokens_per_second"].items()}
    figure, (axes,) = panels("How fast does Longhorn train next to its peers?", height=2.4)
    bars = axes.barh(list(speeds), list(speeds.values()), color=[style(n > 1)["color"] for n in range(len(speeds))])
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=3)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.16)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second, training step, L = {step['length']}, two threads")
    return figure


def long_context() -> Figure:
    """Time to write a token and to read a prompt, of few of the forms that the table has."""
    figures = load("long_context")
    figure, row = panels("What does a long text cost on a CPU?", 2)
    for axes, kind, what in zip(row, ("write", "read"), ("milliseconds_per_token", "seconds")):
        found = {(model, form): cells for model, form, cells in rows_of(figures, kind)}
        shown = [pair for pair in CURVES if pair in found]
        for pair in shown:
            times = {int(length): cell[what] for length, cell in found[pair].items()}
            axes.plot(list(times), list(times.values()), label=label(figures, *pair), **style(CURVES.index(pair)))
        measured_at(axes, [int(length) for pair in shown for length in found[pair]])
        axes.set(yscale="log", xlabel="tokens")
    row[0].set(xlabel="tokens before", ylabel="writing a token (ms)")
    row[1].set(xlabel="tokens of the prompt", ylabel="reading it (s)")
    return figure


def draw_checkpoint(name: str) -> Figure:
    """Perplexity by length of a committed language model beside Llama's, on the scale of all of them."""
    curves = {path.parent.name: by_window(path) for path in sorted(CHECKPOINTS.glob("*/results.json"))}
    curves = {model: points for model, points in curves.items() if points}
    values = [point["perplexity"] for points in curves.values() for point in points]
    shown = {model: curves[model] for model in dict.fromkeys((name, "llama-books"))}
    size = json.loads((CHECKPOINTS / name / "results.json").read_text(encoding="utf-8"))["parameters"]
    first, last = curves[name][0], curves[name][-1]
    finding = f"From {first['length']:,} to {last['length']:,} tokens {name} goes from perplexity "
    finding += f"{first['perplexity']:.1f} to {last['perplexity']:.1f}"
    figure = perplexity_by_length(f"{finding}\n{size / 1e6:.1f} million parameters", shown, first["length"])
    figure.axes[0].set_ylim(0.95 * min(values), 1.05 * max(values))
    return figure


def by_window(path: Path) -> list[dict]:
    found = json.loads(path.read_text(encoding="utf-8")).get("perplexity_by_length", {})
    return [{"length": int(length), "perplexity": value} for length, value in found.items()]


SOURCES = {"training": "longhorn_training"}  # of the others the name
FIGURES = {
    "training": training,
    "long_context": long_context,
    "bst_16k": lambda: length_extrapolation.draw(load("bst_16k")),
    "bst_books": lambda: length_extrapolation.draw(load("bst_books")),
    "checkpoints_length": lambda: length_extrapolation.draw(load("checkpoints_length")),
    "families_books": lambda: compare.draw(load("families_books")["models"]),
    "families_length": lambda: length_extrapolation.draw(load("families_length")),
    "first_token_recall": lambda: pictures.first_token("first_token_recall"),
    "first_token_noise": lambda: pictures.first_token("first_token_noise"),
    "mqar_families": lambda: mqar.draw(load("mqar_families")["best"]),
    "per_token_loss": lambda: per_token_loss.draw(load("per_token_loss")["models"]),
    "scaling_law_5m": lambda: scaling_law.draw(load("scaling_law_5m")["families"]),
    "streaming": pictures.streaming,
    "upcycling_controls": pictures.upcycling_controls,
    "upcycling_grid_256": pictures.kept_layers,
    "upcycling_kinds": pictures.kinds,
    "upcycling_positions": pictures.loss_by_position,
    "upcycling_report": pictures.students,
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
