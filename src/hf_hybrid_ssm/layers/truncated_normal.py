"""Truncated normal distributions of a given variance."""

import math
from typing import TypedDict

KEPT = 0.8796256610342398  # deviation of a standard normal cut at -2 and 2


class Truncation(TypedDict):
    """Arguments of `trunc_normal_`: the deviation before the cut, and where it is cut."""

    std: float
    a: float
    b: float


def truncated_normal(variance: float) -> Truncation:
    """Those for a normal cut at two of its deviations that has this variance once it is cut."""
    std = math.sqrt(variance) / KEPT
    return {"std": std, "a": -2 * std, "b": 2 * std}
