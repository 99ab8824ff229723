"""How many tokens a model needs for another's loss, from the losses that runs were evaluated at on their way."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from _lib.intervals import half_width

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
