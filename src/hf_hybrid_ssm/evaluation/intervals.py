"""Intervals of shares."""

import math
from statistics import NormalDist


def wilson_interval(right: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share, (low, high), from `right` of `count` independent answers.

    Unlike mean ± 1.96 standard errors it holds for few answers and for shares near 0 and 1.

    Raises:
        ValueError: there are no answers, or more right than there are.
    """
    if not 0 <= right <= count or count < 1:
        raise ValueError(f"right={right} must be between 0 and count={count}, which must be at least 1.")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = right / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)
