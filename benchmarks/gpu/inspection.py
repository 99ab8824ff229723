"""(e) A small scan, forward and backward, under NVIDIA's tools: races between threads, and what its warps wait for.

python -m benchmarks.gpu.inspection BATCH LENGTH CHANNELS STATES TIMES runs the scan and nothing else.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.gpu.scan import SHAPES, longhorn
from benchmarks.gpu.settings import Settings

SMALL = (1, 128, 64, 16)
TINY = (1, 16, 16, 4)
LINES = 400  # of what a tool says, from its end
SECONDS = 55
COUNTERS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy")
TOOLS = {
    "racecheck": (SMALL, 1, ["compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "1"]),
    "counters": (
        SHAPES[0],
        3,  # the first two load programs
        ["ncu", "--clock-control", "none", "-k", "regex:forward_kernel|backward_kernel", "-s", "4", "-c", "4"]
        + [word for section in COUNTERS for word in ("--section", section)],
    ),
}


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in settings.pick([*TOOLS], ["racecheck"]):
        yield name, partial(inspected, settings, name)


def inspected(settings: Settings, name: str) -> dict:
    """What the tool says; a rehearsal runs the scan without it."""
    shape, times, tool = TOOLS[name]
    numbers = [str(number) for number in (*settings.pick(shape, TINY), times)]
    command = [*settings.pick(tool, []), sys.executable, "-m", "benchmarks.gpu.inspection", *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=settings.pick(SECONDS, 10 * SECONDS))
    said = (done.stdout + done.stderr).splitlines()[-LINES:]
    return {"said": said} | ({"error": f"status {done.returncode}: {said[-1:]}"} if done.returncode else {})


def main(words: list[str]) -> int:
    import torch

    *shape, times = map(int, words)
    settings = Settings("cuda" if torch.cuda.is_available() else "cpu", False)
    run = longhorn(settings, tuple(shape), True, "triton" if settings.device == "cuda" else "torch")
    for _ in range(times):
        run()
    if settings.device == "cuda":
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
