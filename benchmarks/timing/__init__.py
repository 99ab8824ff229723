"""Paired timings: candidates take turns, so that a noisy machine is noisy for all; medians and ratios are compared."""

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from _lib.provenance import provenance, to_json

RESULTS = Path(__file__).parent.parent / "results"


def paired_seconds(candidates: dict[str, Callable[[], Any]], *, rounds: int = 7, warm_up: int = 2) -> dict[str, float]:
    """Median seconds of each candidate over rounds in which every candidate runs once."""
    for _ in range(warm_up):
        for run in candidates.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """p of the least-squares fit seconds = c · size^p."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def peak_megabytes_of(run: Callable[[], Any]) -> float:
    """How far the resident memory of this process rises above its level before `run` (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark again
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def write_results(name: str, figures: dict[str, Any]) -> None:
    """benchmarks/results/NAME.json, with the command, the machine and the commit; also printed."""
    text = to_json(provenance() | figures)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    print(text)
