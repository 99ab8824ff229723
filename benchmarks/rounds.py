"""Rounds of one thing, as long as there is time. It needs no torch: another program's Python imports it too."""

import time
from collections.abc import Callable
from typing import Any


def timed(run: Callable[[], None], request: dict[str, Any]) -> list[float]:
    """Seconds of each round: `rounds` of them, fewer where `seconds` have passed, at least one."""
    found: list[float] = []
    while not found or (len(found) < request["rounds"] and sum(found) < request["seconds"]):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found
