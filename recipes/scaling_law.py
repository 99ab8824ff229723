"""Fit loss against size for models of several families.

A ladder of models of each family is trained, and loss = (N / N_c)^-alpha fitted to it.

    python recipes/scaling_law.py recipes/configs/lmu_isa/ladder_cpu.yaml [key=value ...]

`base` holds settings of pretrain_clm.py, `families` the members of each ladder by what differs. N counts parameters
beside embeddings. Writes scaling.json and scaling.png to `output_dir`, and both to `results` (a path without ending)
too; every trained model stays in its folder, for per_token_loss.py, and a ladder that was stopped goes on.
"""

import math
import statistics
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _lib.checks import check_named
from _lib.entry import start
from _lib.intervals import half_width, plus_minus, quantile
from _lib.plotting import REFERENCE, SPREAD, panels, style
from _lib.sweeps import check_claim, claim
from _lib.training import say, write_with_picture

import numpy as np
from compare import merged, parsed, run
from matplotlib.figure import Figure

# (N / N_c)^-alpha of arXiv 2110.02402 on OpenWebText2, nats per token
PAPER = {
    "LMU-ISA, the paper": (1.95e14, 0.072),
    "LMU-ISA with attention, the paper": (3.80e14, 0.069),
    "transformer without end, the paper": (6.5e13, 0.077),  # equation 12 without its term of the number of steps
}


@dataclass
class ScalingArguments:
    """Which ladders to train."""

    base: dict[str, Any] = field(metadata={"help": "settings of pretrain_clm.py"})
    families: dict[str, dict[str, dict[str, Any]]] = field(metadata={"help": "family: member: settings that differ"})
    output_dir: str = "runs/scaling-law"
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    results: str | None = field(default=None, metadata={"help": "another path, without extension, for the figures"})
    overwrite: bool = False

    def __post_init__(self):
        for family, members in self.families.items():
            if len(members) < 3:
                raise ValueError(f"families: {family!r} has {len(members)} members; a fit needs at least 3.")
        check_named(self, "families", "seeds")


def fit(sizes: list[float], losses: list[float]) -> dict[str, float]:
    """Least squares of ln loss = alpha (ln N_c - ln N); the error is that of the slope for these points."""
    x, y = np.log(sizes), np.log(losses)
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - (slope * x + intercept)
    error = math.sqrt(residual @ residual / (len(x) - 2) / ((x - x.mean()) @ (x - x.mean())))
    return {"alpha": -slope, "standard_error": error, "log_critical_size": -intercept / slope}


def ladder(points: list[dict[str, Any]]) -> dict[str, Any]:
    """One family's figures: a fit through the mean losses, and the spread of the slope over the seeds."""
    names = list(dict.fromkeys(point["member"] for point in points))
    members = {}
    for name in names:
        runs = [point for point in points if point["member"] == name]
        losses = [run["validation_loss"] for run in runs]
        members[name] = {
            "parameters_beside_embeddings": runs[0]["parameters_beside_embeddings"],
            "validation_loss": statistics.mean(losses),
            "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
            "losses_by_seed": {str(run["seed"]): run["validation_loss"] for run in runs},
        }
    sizes = [member["parameters_beside_embeddings"] for member in members.values()]
    slopes = []
    for seed in sorted({point["seed"] for point in points}):
        losses = [member["losses_by_seed"].get(str(seed)) for member in members.values()]
        if None not in losses and len(losses) > 2:
            slopes.append(fit(sizes, losses)["alpha"])
    found: dict[str, Any] = {"members": members, "alphas_by_seed": slopes}
    if len(names) > 2:
        found |= fit(sizes, [member["validation_loss"] for member in members.values()])
    if len(slopes) > 1:
        found["standard_deviation_of_alpha"] = statistics.stdev(slopes)
    return found


def scaling_law(arguments: ScalingArguments) -> dict[str, Any]:
    """All runs, seed by seed, so that an interrupted ladder is a complete one with fewer seeds."""
    settings = {"base": arguments.base, "families": arguments.families}
    check_claim(arguments.output_dir, settings, arguments.overwrite)
    for family, members in arguments.families.items():  # a wrong last one cannot cost the first one's hours
        for member, over in members.items():
            parsed(Path(arguments.output_dir) / family / member, merged(arguments.base, over))
    claim(arguments.output_dir, settings, arguments.overwrite, "*/*/results.json")
    points: dict[str, list[dict[str, Any]]] = {family: [] for family in arguments.families}
    figures: dict[str, Any] = {}
    for seed in arguments.seeds:
        for family, members in arguments.families.items():
            for member, over in members.items():
                folder = Path(arguments.output_dir) / family / f"{member}-{seed}"
                found = run(folder, merged(arguments.base, over) | {"seed": seed})
                points[family].append({"member": member, "seed": seed, **found})
        figures = {"settings": settings, "seeds": arguments.seeds}
        figures["families"] = {family: ladder(found) for family, found in points.items()}
        picture = partial(draw, figures["families"])
        write_with_picture(figures, picture, Path(arguments.output_dir) / "scaling", arguments.results)
    say(table(figures["families"]))
    return figures


def half_width_of_slope(found: dict[str, Any]) -> float:
    """Half the 95 % interval of a slope through the means of as many sizes as there are members."""
    return quantile(len(found["members"]) - 2) * found["standard_error"]


def draw(families: dict[str, Any]) -> Figure:
    figure, (axes,) = panels("How does the loss fall with size?", height=4.6)
    sizes: list[float] = []
    for number, (family, found) in enumerate(families.items()):
        members = found["members"].values()
        n = [member["parameters_beside_embeddings"] for member in members]
        sizes += n
        spread = [half_width(list(member["losses_by_seed"].values())) or 0.0 for member in members]
        losses = [member["validation_loss"] for member in members]
        label = f"{family}: alpha = {found['alpha']:.3f} ± {half_width_of_slope(found):.3f}"
        axes.errorbar(n, losses, spread, label=label, capsize=3, **style(number, linestyle="none"))
        line = np.exp(-found["alpha"] * (np.log(n) - found["log_critical_size"]))
        axes.plot(n, line, **style(number, marker=""))
    ends = np.array([min(sizes), max(sizes)])
    for dashes, (label, (critical, alpha)) in zip(("--", ":", "-."), PAPER.items()):
        label = f"{label}: alpha = {alpha}"
        axes.plot(ends, (ends / critical) ** -alpha, linestyle=dashes, linewidth=1, color=REFERENCE, label=label)
    several = any(member["standard_deviation"] for found in families.values() for member in found["members"].values())
    notes = [SPREAD] if several else []
    axes.set_title("; ".join([*notes, "grey: the paper's fits, to another text"]), loc="left", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="non-embedding parameters", ylabel="held-out loss (nats per token)")
    return figure


def table(families: dict[str, Any]) -> str:
    lines = ["| family | member | parameters | loss, 95 % | alpha, 95 % |", "| --- | --- | ---: | ---: | ---: |"]
    for family, found in families.items():
        alpha = f"{found['alpha']:.4f} ± {half_width_of_slope(found):.4f}"
        for name, member in found["members"].items():
            half = half_width(list(member["losses_by_seed"].values()))
            loss = f"{member['validation_loss']:.3f}{plus_minus(half, 3)}"
            lines.append(f"| {family} | {name} | {member['parameters_beside_embeddings']:,} | {loss} | {alpha} |")
            family, alpha = "", ""
    return "\n".join(lines)


if __name__ == "__main__":
    start("scaling_law.py", scaling_law, ScalingArguments)
