"""Draws every picture of benchmarks/results from the figures beside it, without measuring anything.

python benchmarks/plots.py                 # all of them, and the checkpoints'; `benchmarks/run.py` does so at its end
python benchmarks/plots.py streaming ...   # some
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import compare
import first_token_recall
import length_extrapolation
import mqar
import numpy as np
import per_token_loss
import rare_words
import scaling_law
import upcycling_gaps
import yaml
from _lib.plotting import REFERENCE, measured_at, panels, perplexity_by_length, style, write_png
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from publish_checkpoint import write_sums

from benchmarks import titles
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
FAMILIES = {"longhorn": "Longhorn", "spade": "SPADE", "bst": "BST", "lmu_isa": "LMU-ISA"}


def curve(axes: Axes, number: int, label: str, seconds: dict[str, float]) -> None:
    axes.plot([int(length) for length in seconds], list(seconds.values()), label=label, **style(number))
    measured_at(axes, map(int, seconds))


def by_length() -> Figure:
    """Seconds of a training step or of forward and backward, beside what linear time would be."""
    figure, row = panels("Does the time grow linearly with the length?", 3)
    steps = ("Longhorn, training step", "window attention, forward and backward", "LMU-ISA, training step")
    for axes, title in zip(row, steps):
        axes.set_title(title, loc="left", fontsize=9)
        axes.set(yscale="log", xlabel="tokens in a sequence", ylabel="time (s)")
    for number, (name, found) in enumerate(load("longhorn_training")["by_length"].items()):
        curve(row[0], number, LONGHORN_AND_PEERS[name], found["seconds"])
    curve(row[1], 0, "window of 128", load("local_attention")["seconds"])
    seconds = load("lmu_isa")["training_step_of_one_row"]
    curve(row[2], 0, "LMU-ISA", seconds["lmu_isa_seconds"])
    curve(row[2], 1, "GPT-2 of transformers", seconds["gpt2_seconds"])
    for axes in row:
        lengths, times = axes.lines[0].get_data()
        line = [times[0], times[0] * lengths[-1] / lengths[0]]
        axes.plot([lengths[0], lengths[-1]], line, color=REFERENCE, linestyle="--", linewidth=1, label="linear")
    return figure


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


def streaming() -> Figure:
    """The change of resident memory, on a scale of two percent of its level, and the loss."""
    figure, (memory, loss) = panels("Are memory and loss steady however long the text?", 2)
    changes, levels = [], []
    for number, (name, found) in enumerate(load("streaming")["models"].items()):
        megabytes, losses = np.array(found["resident_megabytes_by_stretch"]), found["loss_by_stretch"]
        places = found["tokens"] / 1000 * np.arange(1, len(losses) + 1) / len(losses)
        family, _, kind = name.partition(", ")
        # many of the curves cover each other: their markers take turns
        look = style(number, label=f"{FAMILIES.get(family, family)}, {kind}", markevery=(number, 5))
        memory.plot(places, megabytes - megabytes[0], **look)
        loss.plot(places, losses, **look)
        changes += list(megabytes - megabytes[0])
        levels.append(megabytes[0])
    memory.set_ylim(min(changes) - 0.01 * max(levels), max(changes) + 0.01 * max(levels))
    memory.set(xlabel="tokens read (thousands)", ylabel="change of resident memory (MB)")
    memory.set_title(f"resident memory, at first {min(levels):,.0f} to {max(levels):,.0f} MB", loc="left", fontsize=9)
    loss.set(xlabel="tokens read (thousands)", ylabel="loss (nats per token)")
    loss.set_title("loss", loc="left", fontsize=9)
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


def recall_panels() -> dict[str, list[str]]:
    """Title of a panel → its models, as the configuration has them."""
    config = Path(__file__).parents[1] / "recipes/configs/recall/short.yaml"
    return yaml.safe_load(config.read_text(encoding="utf-8"))["groups"]


def entitled(name: str, figure: Figure) -> Figure:
    """The picture under what it shows and the size of its models, instead of the question that its recipe asks."""
    finding, sizes = titles.title(name, load)
    lines = textwrap.wrap(finding, int(10.5 * figure.get_figwidth()))
    figure.suptitle("\n".join([*lines, sizes]), x=0.01, horizontalalignment="left", fontsize=10, fontweight="bold")
    return figure


def draw(name: str) -> Figure:
    return entitled(name, FIGURES[name]())


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


FIGURES = {
    "by_length": by_length,
    "training": training,
    "long_context": long_context,
    "streaming": streaming,
    "bst_16k": lambda: length_extrapolation.draw(load("bst_16k")),
    "bst_books": lambda: length_extrapolation.draw(load("bst_books")),
    "checkpoints_length": lambda: length_extrapolation.draw(load("checkpoints_length")),
    "families_books": lambda: compare.draw(load("families_books")["models"]),
    "families_length": lambda: length_extrapolation.draw(load("families_length")),
    "first_token_recall": lambda: first_token_recall.draw(load("first_token_recall"), recall_panels()),
    "first_token_noise": lambda: first_token_recall.draw(load("first_token_noise"), recall_panels()),
    "mqar_families": lambda: mqar.draw(load("mqar_families")["best"]),
    "per_token_loss": lambda: per_token_loss.draw(load("per_token_loss")["models"]),
    "rare_words": lambda: rare_words.draw(load("rare_words")),
    "scaling_law": lambda: scaling_law.draw(load("scaling_law")["families"]),
    "scaling_law_5m": lambda: scaling_law.draw(load("scaling_law_5m")["families"]),
    "upcycling_gaps": lambda: upcycling_gaps.draw(load("upcycling_gaps")),
}


def drawn() -> list[str]:
    """All pictures but those whose figures were not measured yet."""
    return [name for name in FIGURES if (RESULTS / f"{titles.SOURCES.get(name, name)}.json").is_file()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(FIGURES)}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(FIGURES)):
        parser.error(f"{unknown} are not among {list(FIGURES)}")
    for name in arguments.names or drawn():
        write_png(draw(name), RESULTS / f"{name}.png")
    if not arguments.names:
        for path in sorted(CHECKPOINTS.glob("*/extrapolation.png")):
            write_png(draw_checkpoint(path.parent.name), path)
            write_sums(path.parent)


if __name__ == "__main__":
    main()
