"""Paired timings: candidates take turns, so that a noisy machine is noisy for all; medians and ratios are compared.

On CUDA every run is timed by events on its stream, after a write that empties the cache.
"""

import argparse
import ctypes
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from _lib.provenance import COMMIT, provenance, to_json  # noqa: F401 - for others too

from benchmarks.rounds import forget_peak, peak_bytes, resident_bytes
from hf_hybrid_ssm.training.memory import keep_freed_memory

RESULTS = Path(__file__).parent.parent / "results"
DEVICES = ("cpu", "cuda")
LARGER_THAN_A_CACHE = 256 * 1024 * 1024  # bytes


def machine_arguments(parser: argparse.ArgumentParser, threads: int = 2) -> argparse.Namespace:
    """Adds `--device` and `--threads`, parses, and sets the threads; everything that is measured comes after this.

    Raises:
        SystemExit: CUDA was asked for, and torch sees no GPU.
    """
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="what to measure (default: cpu)")
    parser.add_argument("--threads", type=int, default=threads, help=f"of torch on a CPU (default: {threads})")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cpu":
        keep_freed_memory()  # for every candidate, as the recipes do
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--device cuda: torch {torch.__version__} sees no GPU.")
    return arguments


def paired_seconds(
    candidates: dict[str, Callable[[], Any]], *, rounds: int = 7, warm_up: int = 2, device: str = "cpu"
) -> dict[str, float]:
    """Median seconds of each candidate over rounds in which every candidate runs once."""
    for _ in range(warm_up):
        for run in candidates.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            seconds[name].append(seconds_of(run, device))
    return {name: statistics.median(values) for name, values in seconds.items()}


def seconds_of(run: Callable[[], Any], device: str = "cpu") -> float:
    """Of one run; on CUDA from its first launch to the end of its last kernel."""
    if device == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    _scratch().zero_()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


@functools.cache
def _scratch() -> torch.Tensor:
    return torch.empty(LARGER_THAN_A_CACHE, dtype=torch.int8, device="cuda")


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """p of the least-squares fit seconds = c · size^p."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def peak_megabytes_of(run: Callable[[], Any], device: str = "cpu") -> float:
    """How far memory rises above its level before `run`: resident memory of this process (Linux), or of the GPU."""
    if device == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - begin) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # what was kept of earlier runs is no use of this one
    forget_peak()
    before = resident_bytes()
    run()
    return (peak_bytes() - before) / 2**20


def write_results(name: str, figures: dict[str, Any], device: str = "cpu") -> None:
    """benchmarks/results/NAME.json (gpu_NAME.json on CUDA) with the command, machine and commit; also printed.

    A quick run is printed alone: its sizes are not those of the figures that documents show.
    """
    text = to_json(provenance() | figures)
    print(text)
    if "--quick" not in sys.argv:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{'gpu_' if device == 'cuda' else ''}{name}.json").write_text(text, encoding="utf-8")
