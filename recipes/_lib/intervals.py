"""Intervals of means."""

import math
import statistics
from collections.abc import Sequence

from scipy.stats import t as student


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean (Student's t); None of fewer than two."""
    if len(values) < 2:
        return None
    return float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
