"""Pictures: those of committed figures, and of data made to spoil them, have names, and legends beside the curves."""

import math

import mqar
import pytest
from _lib.plotting import finish, loss_by_step, measured_at, panels, perplexity_by_length, style, write_png
from matplotlib.category import StrCategoryLocator

from benchmarks.pictures import FIGURES, draw_checkpoint


def check(figure):
    figure.draw_without_rendering()
    assert figure.get_suptitle()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert not any(legend.get_window_extent().overlaps(box) for legend in legends), "a legend over curves"
        for axis in (axes.xaxis, axes.yaxis):
            categories = isinstance(axis.get_major_locator(), StrCategoryLocator)  # these name themselves
            assert axis.get_label_text() or categories, "an axis without a name"
            assert not any("$" in label.get_text() for label in axis.get_majorticklabels()), "no plain number"
    assert legends or not any(len(axes.get_legend_handles_labels()[1]) > 1 for axes in figure.axes)


@pytest.mark.parametrize("name", FIGURES)
def test_committed_pictures_are_readable(name):
    figure = FIGURES[name]()
    finish(figure)
    check(figure)


def test_pictures_of_checkpoints_have_one_scale_and_a_llama():
    figures = [draw_checkpoint(name) for name in ("longhorn-books", "lmu-isa-books")]
    assert len({figure.axes[0].get_ylim() for figure in figures}) == 1
    for figure in figures:
        assert "llama-books" in figure.axes[0].get_legend_handles_labels()[1]


def test_points_stand_at_their_lengths():
    curves = {f"model {n}": points([256, 512], [80 + n, 81], 0.1) for n in range(5)}
    figure = perplexity_by_length(QUESTION, curves, 256)
    drawn = [list(container.lines[0].get_xdata()) for container in figure.axes[0].containers]
    assert drawn == [[256, 512]] * 5


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


def test_the_same_figures_give_the_same_file(tmp_path):
    for name in ("one", "two"):
        write_png(SPOILT["noise"](), tmp_path / f"{name}.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_measured_places_are_labelled():
    figure, (axes,) = panels(QUESTION)
    axes.plot([256, 8192], [1, 2], **style(0))
    measured_at(axes, [8192, 256, 8192])
    finish(figure)
    figure.draw_without_rendering()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "8,192"]
