"""Truncated normal distributions of a given variance."""

import math

KEPT = 0.8796256610342398  # deviation of a standard normal cut at -2 and 2


def truncated_normal(variance: float) -> dict[str, float]:
    """Arguments of `trunc_normal_` for a normal cut at two of its deviations that has this variance once it is cut."""
    std = math.sqrt(variance) / KEPT
    return {"std": std, "a": -2 * std, "b": 2 * std}
