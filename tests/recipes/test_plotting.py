"""Pictures are read as they are drawn: the geometry of every one that is committed, and of data made to spoil it."""

import itertools
import math

import mqar
import numpy as np
import pytest
from _lib import plotting
from _lib.plotting import finish, loss_by_step, measured_at, panels, perplexity_by_length, style, write_png
from matplotlib.category import StrCategoryLocator
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from PIL import Image

from benchmarks.pictures import FIGURES, RESULTS, draw_checkpoint, drawn

SLACK = 0.5  # pixels


def inside(inner, outer):
    low, high = outer.min - SLACK, outer.max + SLACK
    return (inner.min >= low).all() and (inner.max <= high).all()


def shown_labels(axis):
    """Those that are printed: matplotlib keeps labels beyond the limits too."""
    low, high = sorted(axis.get_view_interval())
    labels = [*axis.get_majorticklabels(), *axis.get_minorticklabels()]
    places = [*axis.get_majorticklocs(), *axis.get_minorticklocs()]
    shown = [label for label, place in zip(labels, places) if low <= place <= high]
    return [label for label in shown if label.get_text() and label.get_visible()]


def check_labels(axes, figure):
    for axis in (axes.xaxis, axes.yaxis):
        categories = isinstance(axis.get_major_locator(), StrCategoryLocator)  # these name themselves
        assert axis.get_label_text() or categories, "an axis without a name"
        labels = shown_labels(axis)
        assert len(labels) >= (3 if axis is axes.yaxis else 1), "too few labels to read values from"
        for label in labels:
            assert "$" not in label.get_text(), f"{label.get_text()} is not a plain number"
            assert inside(label.get_window_extent(), figure.bbox), f"{label.get_text()} leaves the figure"
        for one, other in itertools.combinations(labels, 2):
            overlap = one.get_window_extent().overlaps(other.get_window_extent())
            assert not overlap, f"{one.get_text()} and {other.get_text()} overprint"
        name = axis.get_label_text()
        assert not name or inside(axis.label.get_window_extent(), figure.bbox), f"{name} leaves the figure"


def points_of(axes):
    """In pixels; those that cannot be drawn, such as infinity, are left out."""
    found = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    segments = [c.get_segments() for c in axes.collections if isinstance(c, LineCollection)]
    found += [axes.transData.transform(segment) for each in segments for segment in each]
    points = np.concatenate(found) if found else np.zeros((0, 2))
    return points[np.isfinite(points).all(1)]


def check_limits(axes):
    box = axes.get_window_extent()
    points = points_of(axes)
    assert ((points >= box.min - SLACK) & (points <= box.max + SLACK)).all(), "a point outside the axes"
    bars = [bar for group in axes.containers if isinstance(group, BarContainer) for bar in group]
    for bar in bars:
        assert bar.get_x() == 0 and axes.get_xscale() == "linear" and axes.get_xlim()[0] == 0, "a bar not from 0"
        assert bar.get_width() <= axes.get_xlim()[1]
    if not bars and axes.get_autoscaley_on():
        assert_not_zoomed(axes)


def assert_not_zoomed(axes):
    low, high = axes.get_ylim()
    span = math.log(high / low) if axes.get_yscale() == "log" else (high - low) / max(abs(low), abs(high))
    assert span >= 0.09, "so close that noise looks like drama"


def check_legends(figure):
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    texts = [figure._suptitle, *(axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis))]
    texts += [axes.title for axes in figure.axes] + [axes._left_title for axes in figure.axes]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    for legend in legends:
        box = legend.get_window_extent()
        assert inside(box, figure.bbox), "a legend leaves the figure"
        assert not any(box.overlaps(axes.get_window_extent()) for axes in figure.axes), "a legend over curves"
        assert not any(box.overlaps(other) for other in boxes), "a legend over text"
    curves = [axes for axes in figure.axes if len(axes.get_legend_handles_labels()[1]) > 1]
    assert not curves or legends, "curves without names"


def check_colours(axes):
    allowed = {to_hex(colour) for colour in (*plotting.PALETTE, plotting.REFERENCE)}
    assert {to_hex(line.get_color()) for line in axes.lines} <= allowed, "a colour beside the palette"


def check(figure):
    """Everything that a reader needs, measured on the drawn figure."""
    figure.draw_without_rendering()
    title = figure._suptitle
    assert title is not None and title.get_text(), "no title"
    assert inside(title.get_window_extent(), figure.bbox)
    check_legends(figure)
    for axes in figure.axes:
        assert inside(axes.get_tightbbox(), figure.bbox), "a panel leaves the figure"
        check_labels(axes, figure)
        check_limits(axes)
        check_colours(axes)
    for one, other in itertools.combinations(figure.axes, 2):
        assert not one.get_tightbbox().overlaps(other.get_tightbbox()), "panels overlap"


@pytest.mark.parametrize("name", drawn())
def test_committed_pictures_are_readable(name):
    figure = FIGURES[name]()
    finish(figure)
    check(figure)


@pytest.mark.parametrize("name", ["longhorn-books", "llama-books"])
def test_pictures_of_checkpoints_have_one_scale_and_a_llama(name):
    figure, other = draw_checkpoint(name), draw_checkpoint("lmu-isa-books")
    for each in (figure, other):
        finish(each)
        check(each)
    assert figure.axes[0].get_ylim() == other.axes[0].get_ylim()
    assert {name, "llama-books"} <= set(figure.axes[0].get_legend_handles_labels()[1])


def test_points_stand_at_their_lengths():
    curves = {f"model {n}": points([256, 512], [80 + n, 81], 0.1) for n in range(5)}
    figure = perplexity_by_length(QUESTION, curves, 256)
    drawn = [list(container.lines[0].get_xdata()) for container in figure.axes[0].containers]
    assert drawn == [[256, 512]] * 5


def test_every_committed_picture_is_drawn_from_results():
    assert {path.stem for path in RESULTS.glob("*.png")} == set(drawn())
    for path in RESULTS.glob("*.png"):
        assert path.stat().st_size < 64_000, f"{path.name} is large"
        with Image.open(path) as image:
            assert round(image.info["dpi"][0]) == 200 and image.width >= 1400


def points(lengths, perplexities, deviation=None):
    """As length_extrapolation.py finds them."""
    return [
        {"length": length, "perplexity": value, "standard_deviation_of_loss": deviation}
        for length, value in zip(lengths, perplexities)
    ]


MANY = [96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 448, 512, 768, 1024, 131072]
QUESTION = "Does it last?"
HISTORY = [{"step": step, "loss": 9.0 / step} for step in range(1, 90)] + [{"step": 89, "eval_loss": 0.4}]
RESULT = {"accuracy": 1.0, "pairs": [4, 8], "accuracy_by_pairs": {"4": 1.0, "8": 0.5}}
ACCURACIES = [
    {"model": model, "length": length, "width": width} | RESULT
    for model in ("longhorn", "a model with a long name")
    for length in (64, 256)
    for width in (64, 72, 80, 128)
]
SPOILT = {
    "crowded lengths": lambda: perplexity_by_length(QUESTION, {"a": points(MANY, range(50, 65))}, 256),
    "noise": lambda: perplexity_by_length(QUESTION, {"a": points([1, 2, 4, 8], [77.1, 77.2, 77.05, 77.1])}, None),
    "far apart": lambda: perplexity_by_length(
        QUESTION, {"Llama": points([256, 512], [80.0, 9e6]), "low": points([256, 512], [1.5, 1.2])}, 256
    ),
    "wide bars": lambda: perplexity_by_length(
        QUESTION, {f"model {n}": points([256, 512], [80 + n, 81], 0.7) for n in range(7)}, 256
    ),
    "infinite": lambda: perplexity_by_length(QUESTION, {"a": points([64, 128, 256], [70.0, 75.0, math.inf])}, None),
    "long names": lambda: perplexity_by_length(
        QUESTION, {f"{n} of the models whose names say much about them": points([2, 4], [3, 4]) for n in range(6)}, 2
    ),
    "one point": lambda: perplexity_by_length(QUESTION, {"a": points([256], [70.0])}, 256),
    "training": lambda: loss_by_step(HISTORY, {"unigram of the training text": 5.0, "bigram": 3.0}),
    "panels that share curves": lambda: mqar.draw(ACCURACIES),
    "accuracies by pairs": lambda: mqar.draw([found for found in ACCURACIES if found["width"] == 64]),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_difficult_data_stays_readable(kind, tmp_path):
    figure = SPOILT[kind]()
    write_png(figure, tmp_path / "picture.png")
    check(figure)
    assert (tmp_path / "picture.png").stat().st_size < 60_000


def test_the_same_figures_give_the_same_file(tmp_path):
    for name in ("one", "two"):
        write_png(SPOILT["noise"](), tmp_path / f"{name}.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_the_file_keeps_every_colour(tmp_path):
    figure, (axes,) = panels(QUESTION)
    for number in range(len(plotting.PALETTE)):
        axes.plot([0, 1], [number, number], **style(number, linewidth=4))
    write_png(figure, tmp_path / "colours.png")
    with Image.open(tmp_path / "colours.png") as image:
        found = {colour for _, colour in image.convert("RGB").getcolors()}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in plotting.PALETTE} <= found


def test_measured_places_are_labelled():
    figure, (axes,) = panels(QUESTION)
    axes.plot([256, 8192], [1, 2], **style(0))
    measured_at(axes, [8192, 256, 8192])
    finish(figure)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "8,192"]
