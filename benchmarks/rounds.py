"""Rounds of one thing as long as there is time, and memory of this process as Linux counts it, in bytes.

It needs no torch: another program's Python imports it too.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKS = Path("/proc/self/clear_refs")


def timed(run: Callable[[], None], request: dict[str, Any]) -> list[float]:
    """Seconds of each round: `rounds` of them, fewer where `seconds` have passed, at least one."""
    found: list[float] = []
    while not found or (len(found) < request["rounds"] and sum(found) < request["seconds"]):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def writing(rounds: list[float], steps: int) -> dict[str, Any]:
    """Of rounds of `steps` tokens, one after the other: milliseconds a token, the median and each round's."""
    each = [1000 * seconds / steps for seconds in rounds]
    return {
        "milliseconds_per_token": round(statistics.median(each), 3),
        "rounds": [round(milliseconds, 3) for milliseconds in each],
    }


def reading(rounds: list[float], length: int) -> dict[str, Any]:
    """Of rounds of one prompt of `length` tokens: seconds, the median and each round's, and tokens a second."""
    seconds = statistics.median(rounds)
    return {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(length / seconds, 1),
        "rounds": [round(each, 4) for each in rounds],
    }


def resident_bytes(process: int | str = "self") -> int:
    """What lies in memory now, files mapped into it included; of another process by its number."""
    return _status("VmRSS", process)


def peak_bytes() -> int:
    """The most that has been resident since the start, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    MARKS.write_text("5", encoding="utf-8")


def _status(name: str, process: int | str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
