"""Intervals of means: "±" stands for half the width of the 95 % interval of Student's t, on every page and plot."""

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
