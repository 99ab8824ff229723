"""Draws benchmarks/results/by_length.png and training.png from the results; `benchmarks/run.py` calls it."""

import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def curve(axes: Axes, label: str, seconds: dict[str, float]) -> None:
    axes.loglog([int(length) for length in seconds], list(seconds.values()), marker="o", markersize=3, label=label)


def by_length() -> Figure:
    """Seconds of a training step or of forward and backward; a straight line of slope one is linear time."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for name, found in load("longhorn_training")["by_length"].items():
        curve(panels[0], name, found["seconds"])
    curve(panels[1], "window of 128", load("local_attention")["seconds"])
    steps = load("lmu_isa")["training_step_of_one_row"]
    curve(panels[2], "LMU-ISA", steps["lmu_isa_seconds"])
    curve(panels[2], "GPT-2 of transformers", steps["gpt2_seconds"])
    for panel, title in zip(panels, ("Longhorn, training step", "window attention", "LMU-ISA, training step")):
        panel.set(title=title, xlabel="tokens", ylabel="seconds")
        panel.legend(fontsize=7)
    return figure


def training() -> Figure:
    """Tokens a second of a training step of Longhorn and its peers."""
    step = load("longhorn_training")["training_step"]
    speeds = step["tokens_per_second"]
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(list(speeds), list(speeds.values()))
    axes.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=2)
    axes.set(xscale="log", xlabel=f"tokens a second, training step at L = {step['length']}, two CPU threads")
    axes.set_xlim(right=2 * max(speeds.values()))
    axes.invert_yaxis()
    return figure


METRICS = {"by_length": by_length, "training": training}


def main() -> None:
    for name, draw in METRICS.items():
        draw().savefig(RESULTS / f"{name}.png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
