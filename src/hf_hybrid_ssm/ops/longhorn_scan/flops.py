"""Operations of the Longhorn scan, for torch's `FlopCounterMode`."""

import math
from typing import Any


def scan_flops(x: Any, beta_logit: Any, k: Any, *_: Any) -> int:
    """Nine for each number of the state: square of the key, decay (2), written value (2), update (2), read-out (2)."""
    return 9 * math.prod(x) * k[-1]
