"""Pictures of one look: size, colours, plain numbers at the ticks, and legends outside of the curves.

figure, (axes,) = panels("Does the loss fall?")
axes.plot(steps, losses, label="training", **style(0))
axes.set(xlabel="step", ylabel="loss (nats per token)")
write_png(figure, "loss.png")
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.category import StrCategoryLocator
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

# Okabe and Ito's: told apart by the colour-blind. Markers tell curves apart in print.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
REFERENCE = "0.45"  # the grey of what was not measured
SPREAD = "bars: 95 % intervals of the mean over seeds"
DOTS_PER_INCH = 200
COLUMNS = 2  # of a legend


def panels(question: str, count: int = 1, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in a row, under the question that it answers or what it shows."""
    figure = Figure(figsize=(7.0 if count == 1 else 2.6 + 2.7 * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(question, x=0.01, horizontalalignment="left", fontsize=11, fontweight="bold")
    row = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        axes.xaxis.label.set_size(9)
        axes.yaxis.label.set_size(9)
    return figure, row


def style(number: int, **changes: Any) -> dict[str, Any]:
    """Keywords of `plot` and `errorbar` for the curve of that number."""
    place = number % len(PALETTE)
    return {"color": PALETTE[place], "marker": MARKERS[place], "markersize": 4, "linewidth": 1.4} | changes


def measured_at(axes: Axes, places: Iterable[float]) -> None:
    """A log x axis whose labels are the measured `places`."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(places))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelrotation=45)


def write_png(figure: Figure, path: str | Path) -> None:
    """Finished, with no date or version, so that the same figures give the same file."""
    finish(figure)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})


def finish(figure: Figure) -> None:
    """Ticks and legends; done once everything is drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            _plain_numbers(axis)
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    if found[0][1] and all(labels == found[0][1] for _, labels in found):  # one for all panels
        figure.legend(*found[0], loc="outside lower left", ncols=COLUMNS, frameon=False, fontsize=8)
        return
    for axes, curves in zip(figure.axes, found):
        if curves[1]:
            axes.legend(*curves, loc="upper left", bbox_to_anchor=(0, -0.22), frameon=False, fontsize=8)


def _plain_numbers(axis: Axis) -> None:
    """Without powers or offsets; of a log axis between its decades too."""
    if isinstance(axis.get_major_locator(), StrCategoryLocator):  # names of bars
        return
    if isinstance(axis.get_major_locator(), LogLocator):
        axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def perplexity_by_length(question: str, models: dict[str, list[dict[str, Any]]], trained_at: int | None) -> Figure:
    """Curves of points with `length`, `loss`, `perplexity` and, of several seeds, `half_width_of_loss`."""
    figure, (axes,) = panels(question)
    with_spread = any(point.get("half_width_of_loss") for points in models.values() for point in points)
    for number, (name, points) in enumerate(models.items()):
        middle = np.array([point["perplexity"] for point in points])
        half = np.array([point.get("half_width_of_loss") or 0.0 for point in points])
        spread = middle * np.array([1 - np.exp(-half), np.exp(half) - 1]) if with_spread else None
        places = [point["length"] for point in points]
        axes.errorbar(places, middle, spread, label=name, capsize=3, **style(number))
    if trained_at is not None:
        axes.axvline(trained_at, color=REFERENCE, linestyle="--", linewidth=1, label="length of training")
    measured_at(axes, [point["length"] for points in models.values() for point in points])
    if with_spread:
        axes.set_title(SPREAD, loc="left", fontsize=9)
    axes.set(yscale="log", xlabel="tokens read at a time", ylabel="perplexity per token")
    return figure


def loss_by_step(history: list[dict[str, float]], levels: dict[str, float] | None = None) -> Figure:
    """Training and validation loss of a Trainer's log; `levels` are drawn as horizontal lines."""
    figure, (axes,) = panels("Does the loss fall?")
    for number, (key, label) in enumerate((("loss", "training"), ("eval_loss", "validation"))):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            many = len(points) > 40
            axes.plot(*zip(*points), label=label, **style(number, marker="" if many else MARKERS[number]))
    for number, (label, level) in enumerate((levels or {}).items()):
        axes.axhline(level, label=label, linestyle="--", linewidth=1, color=PALETTE[2 + number])
    axes.set(xlabel="step", ylabel="cross-entropy (nats per token)")
    return figure
