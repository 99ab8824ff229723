"""Paired timings: candidates take turns, so that a noisy machine is noisy for all; medians and ratios are compared."""

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

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


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_results(name: str, figures: dict[str, Any]) -> None:
    """benchmarks/results/NAME.json, with the machine and the command; also printed."""
    command = f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
    if data := os.environ.get("HF_HYBRID_SSM_DATA"):  # where the data lies is this machine's affair
        command = command.replace(data, "$HF_HYBRID_SSM_DATA")
    content = {"command": command, "machine": machine()}
    text = json.dumps(content | figures, indent=2) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    print(text)
