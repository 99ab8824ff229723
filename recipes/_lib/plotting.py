"""Readable pictures: size, colours, ticks, limits and legends in one place.

    figure, (axes,) = panels("Does the loss fall?")
    axes.plot(steps, losses, label="training", **style(0))
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    write_png(figure, "loss.png")

`finish`, which `write_png` calls, sees to what is easily forgotten: every point lies inside the limits, these never
zoom into noise, ticks of log axes are plain numbers, no label prints over another, and legends lie outside the curves.
"""

import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.category import StrCategoryLocator
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer, Container
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from PIL import Image

# Okabe and Ito's: told apart by the colour-blind. Markers tell curves apart in print.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
REFERENCE = "0.45"  # the grey of what was not measured
LEAST_RANGE = 0.1  # of the y axis, relative to the values: a difference of 1 % looks like one
MARGIN = 0.06  # of the axis's range, above and below the curves
SPREAD = "bars: 95 % intervals of the mean over seeds"
GAP = 4  # pixels between labels
DOTS_PER_INCH = 200
SHADES = 16  # of each colour in the file, from white


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


def finish(figure: Figure) -> None:
    """Limits, ticks and legends; done once everything is drawn. Limits that were set by hand stay."""
    for axes in figure.axes:
        if axes.get_autoscaley_on() and not _bars(axes):
            _contain(axes)
        for axis in (axes.xaxis, axes.yaxis):
            _plain_ticks(axis)
    _place_legends(figure)
    figure.draw_without_rendering()
    for axes in figure.axes:
        _thin_labels(axes.xaxis, 0)
        _thin_labels(axes.yaxis, 1)


def write_png(figure: Figure, path: str | Path) -> None:
    """Finished, with few colours and no date or version, so that the same figures give the same small file."""
    finish(figure)
    canvas = FigureCanvasAgg(figure)
    canvas.print_figure(io.BytesIO(), dpi=DOTS_PER_INCH, format="rgba")  # a PNG would be written and read for nothing
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image = image.quantize(palette=_file_palette(), dither=Image.Dither.NONE)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG", optimize=True, dpi=(DOTS_PER_INCH, DOTS_PER_INCH))


def _file_palette() -> Image.Image:
    """Our colours and the shades between each of them and white, which smooth the edges of lines and letters."""
    strengths = np.linspace(0, 1, SHADES)[:, None]
    colours = np.concatenate([255 - strengths * (255 - 255 * np.array(to_rgb(colour))) for colour in PALETTE])
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours.round().astype(np.uint8).tobytes())
    return palette


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


def _bars(axes: Axes) -> bool:
    return any(isinstance(container, BarContainer) for container in axes.containers)


def _contain(axes: Axes) -> None:
    """y limits around all that is drawn, error bars too, never closer than LEAST_RANGE."""
    low, high = axes.dataLim.intervaly
    log = axes.get_yscale() == "log"
    low = axes.dataLim.minposy if log else low
    if not (math.isfinite(low) and math.isfinite(high)):
        return  # nothing was drawn, or nothing finite
    least = math.log1p(LEAST_RANGE) if log else LEAST_RANGE * max(abs(low), abs(high))
    low, high = (math.log(low), math.log(high)) if log else (low, high)
    half = max(high - low, least) * (0.5 + MARGIN)
    bottom, top = (low + high) / 2 - half, (low + high) / 2 + half
    axes.set_ylim((math.exp(bottom), math.exp(top)) if log else (bottom, top))


def _plain_ticks(axis: Axis) -> None:
    """Numbers without powers or offsets, and nothing between them."""
    low, high = sorted(axis.get_view_interval())
    locator, log = axis.get_major_locator(), axis.get_scale() == "log"
    if isinstance(locator, StrCategoryLocator):  # names of bars
        return
    if isinstance(locator, FixedLocator):
        ticks, places = [float(place) for place in locator.tick_values(low, high)], None
    elif log and (ticks := _log_ticks(low, high)):
        places = None
    else:
        ticks = [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
        places = max(len(f"{tick:.10g}".partition(".")[2]) for tick in ticks)  # as many for all of them
    ticks = [tick for tick in ticks if low <= tick <= high]
    axis.set_minor_locator(NullLocator())
    axis.set_ticks(ticks, [f"{tick:,.10g}" if places is None else f"{tick:,.{places}f}" for tick in ticks])


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers of each decade; none where fewer than four fit, since evenly spaced ones read better there."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 4:
            return ticks
    return []


def _place_legends(figure: Figure) -> None:
    """Above each panel, at the left; one below all panels where they show the same curves."""
    found = [_curves(axes) for axes in figure.axes]
    if len(found) > 1 and found[0][1] and all(labels == found[0][1] for _, labels in found):
        _as_many_columns_as_fit(figure.legend, found[0], figure.bbox.width, loc="outside lower left")
        return
    room = figure.bbox.width / len(figure.axes) - 0.9 * figure.dpi  # beside the labels of the y axis
    for axes, curves in zip(figure.axes, found):
        if curves[1]:
            above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
            _as_many_columns_as_fit(axes.legend, curves, room, title=axes.get_title(loc="left") or None, **above)
            axes.set_title("", loc="left")  # the legend carries it, since a title would stand in its place


def _curves(axes: Axes) -> tuple[list[Any], list[str]]:
    """Handles and labels, measurements before lines of reference."""
    pairs = sorted(zip(*axes.get_legend_handles_labels()), key=lambda pair: not isinstance(pair[0], Container))
    return [handle for handle, _ in pairs], [label for _, label in pairs]


def _as_many_columns_as_fit(place: Callable[..., Legend], curves: Any, room: float, **options: Any) -> None:
    for columns in range(len(curves[1]), 0, -1):
        narrow = {"columnspacing": 1.2, "handlelength": 1.8, "frameon": False, "fontsize": 8, "title_fontsize": 9}
        legend = place(*curves, ncols=columns, **narrow, **options)
        if legend.get_window_extent().width <= room or columns == 1:
            return
        legend.remove()


def _thin_labels(axis: Axis, side: int) -> None:
    """Leaves out every label that would print over the last one kept; their ticks stay."""
    labels = [label for label in axis.get_majorticklabels() if label.get_text()]
    begins = {label: label.get_window_extent().min[side] for label in labels}
    end = -math.inf
    for label in sorted(labels, key=lambda label: begins[label]):
        if begins[label] < end + GAP:
            label.set_visible(False)
        else:
            end = label.get_window_extent().max[side]
