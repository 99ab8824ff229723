"""Means with intervals, and how many tokens a model needs for another's loss.

"±" stands for half the width of the 95 % interval of Student's t, on every page and plot.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import t as student


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean (Student's t); None of fewer than two."""
    return half_width_of(statistics.stdev(values), len(values)) if len(values) > 1 else None


def mean_of(values: Sequence[float]) -> dict[str, Any]:
    """Their mean, and half the width of its 95 % interval."""
    return {"mean": statistics.mean(values), "half_width_of_95_percent": half_width(values)}


def half_width_of(deviation: float | None, count: int) -> float | None:
    """The same from the standard deviation of `count` values; None of fewer than two."""
    if deviation is None or count < 2:
        return None
    return quantile(count - 1) * deviation / math.sqrt(count)


def quantile(degrees: int) -> float:
    """By what a standard error with so many degrees of freedom is multiplied."""
    return float(student.ppf(0.975, degrees))


def plus_minus(half: float | None, digits: int) -> str:
    """ " ± 0.123", or nothing of a single value."""
    return "" if half is None else f" ± {half:.{digits}f}"


POINTS = 4
"""A curve of fewer points does not say where between two of them a loss was reached."""


def tokens_to_reach(curve: Sequence[dict[str, float]], loss: float) -> float | None:
    """The tokens after which a run's validation loss was first at `loss` or below; None where it never was.

    Between two evaluations the loss is taken as a straight line in the logarithm of the tokens. Before the first one
    nothing is known: a run that was there by then counts as having needed all of its tokens.
    """
    for before, after in zip([None, *curve], curve):
        if after["loss"] > loss:
            continue
        if before is None:
            return after["tokens"]
        part = (before["loss"] - loss) / (before["loss"] - after["loss"])
        return math.exp(math.log(before["tokens"]) * (1 - part) + math.log(after["tokens"]) * part)
    return None


def token_efficiency(run: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as many tokens the other run needs for the same loss, which is the higher of the two final ones.

    Above 1, the run reaches the other's final loss after a part of its own tokens; below 1, the other reaches the
    run's. Schedules that lower the learning rate to the end favour neither, but shorten what is seen: with a schedule
    that ended there, the leading run would have been there earlier.
    """
    needed = tokens_to_reach(run["curve"], other["curve"][-1]["loss"])
    if needed is not None:
        return other["curve"][-1]["tokens"] / needed
    return tokens_to_reach(other["curve"], run["curve"][-1]["loss"]) / run["curve"][-1]["tokens"]


def token_efficiencies(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Over the seeds that both have: the geometric mean, its 95 % interval (Student's t of the logarithms; None of one
    seed), and each seed's. None where a run was evaluated at fewer than `POINTS` times on its way."""
    base = {run["seed"]: run for run in others}
    pairs = [(run, base[run["seed"]]) for run in runs if run["seed"] in base]
    if not pairs or any(len(each["curve"]) < POINTS for pair in pairs for each in pair):
        return None
    each = [token_efficiency(*pair) for pair in pairs]
    logs = [math.log(ratio) for ratio in each]
    mean, half = statistics.mean(logs), half_width(logs)
    interval = None if half is None else [math.exp(mean - half), math.exp(mean + half)]
    return {"mean": math.exp(mean), "interval_of_95_percent": interval, "by_seed": each}
