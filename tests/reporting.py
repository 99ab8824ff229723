"""What is run seldom, by name, and the pages in reports/ that some of it writes.

    python -m tests.reporting --list              every name that can be run, and what it is for
    python -m tests.reporting invariants          run it; further arguments go to its last command

Tests take every variant instead of a few where `HF_HYBRID_SSM_THOROUGH` is set (`THOROUGH`), as here. Figures that
tests record are in pytest's own report: add `--junitxml FILE`.
"""

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"
THOROUGH = "HF_HYBRID_SSM_THOROUGH" in os.environ
UPSTREAM = "HF_HYBRID_SSM_UPSTREAM_TESTS"
PROCESSOR_TESTS = "tests/ops tests/layers tests/models tests/golden tests/invariants"


@dataclass(frozen=True)
class Job:
    """What it is for; commands without `python`, run in order until one fails; their environment.

    Args:
        one_thread: whether OpenMP gets a single thread.
    """

    about: str
    commands: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    one_thread: bool = True


def _thorough(about: str, tests: str, *before: str) -> Job:
    return Job(about, (*before, f"-m pytest -q {tests}"), (("HF_HYBRID_SSM_THOROUGH", "1"),))


JOBS = {
    "portable": Job(
        # torch rounds its sums in another order where it does without AVX, and no tolerance may depend on that
        "what depends on the processor, with torch's code for any processor: no AVX",
        (f"-m pytest -n 2 --dist worksteal {PROCESSOR_TESTS}",),
        (("ATEN_CPU_CAPABILITY", "default"),),
    ),
    "sanitize": Job(
        "random calls and misuse of the C kernels under the compiler's sanitizers, for ten minutes",
        ("-m tests.ops.sanitize --seconds 600",),
        one_thread=False,
    ),
    "upstream": Job(
        "transformers' own model tests on the families",
        ("-m pytest -q -n 2 --dist worksteal tests/upstream",),
    ),
    "invariants": Job(
        "10,000 random cases of every batching invariance, with a page", ("-m tests.invariants.run --cases 10000",)
    ),
    "programs": _thorough("10,000 random programs on models and their caches", "tests/programs --timeout 20000"),
    "matrix": _thorough(
        "PEFT, quantization, compiling, export, offloading: every family in every cell",
        "-n 1 --timeout 1800 tests/matrix",  # in a process of their own, which starts again after a crash
        "-m pip install --quiet -r tests/matrix/requirements.txt",
    ),
    "reliability": _thorough(
        "round trips, determinism, numerical stability, misuse, damaged files, crashes, several processes",
        "tests/reliability tests/distributed tests/test_planning.py",
    ),
    "vllm": _thorough("the families in vLLM's engine (`make vllm` has its environment)", "tests/serving/engine"),
    "operation-counts": Job("operations of a layer, with a page", ("-m tests.models.operation_counts",)),
    "bench": Job("the benchmarks; results in benchmarks/results", ("benchmarks/run.py",), one_thread=False),
    "streaming": Job(
        "a million tokens in constant memory",
        ("benchmarks/streaming.py --tokens 1000000",),
        one_thread=False,
    ),
    "lowest": Job("the tests with the lowest versions of the dependencies", ("-m tools.versions lowest",)),
    "newest": Job("the tests with the newest versions of the dependencies", ("-m tools.versions newest",)),
    "smoke": Job(
        "two minutes with the lowest transformers, and with what pip resolves today",
        ("-m tools.versions smoke",),
        one_thread=False,
    ),
    "triton": Job(
        "the kernels with every version of Triton that is admitted: interpreted, compiled (hours)",
        ("-m tools.versions triton",),
        one_thread=False,
    ),
    "build": Job("the wheel and the source distribution in dist/", ("-m hatchling build",), one_thread=False),
    "cards": Job("the model cards of the papers' language models", ("tools/model_cards.py",), one_thread=False),
    "clean-room": Job(
        "exported folders in a new environment that lacks the package, lm-eval's own command included",
        ("-m pytest tests/hub/test_clean_environment.py",),
        (("HF_HYBRID_SSM_CLEAN_ROOM", "1"),),
    ),
}


def run(name: str, arguments: Sequence[str]) -> int:
    """The status of the first command that fails, or 0."""
    job = JOBS[name]
    environment = os.environ | dict(job.environment)
    if job.one_thread:
        environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if name == "upstream" and UPSTREAM not in environment:  # transformers' own tests are downloaded first
        fetch = [sys.executable, "tests/upstream/fetch.py"]
        environment[UPSTREAM] = subprocess.run(
            fetch, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
    for command in job.commands:
        words = [sys.executable, *shlex.split(command), *(arguments if command is job.commands[-1] else [])]
        if status := subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
            return status
    return 0


# -- what a generated page says -------------------------------------------------------------------------------------


def made_by(command: str) -> str:
    """The line that every generated page has: its command, commit ("+" after it: and changes) and versions."""
    sys.path.insert(0, str(ROOT / "recipes"))
    from _lib.provenance import COMMIT, machine

    found = machine()
    versions = ", ".join(f"{name} {found[name]}" for name in ("python", "torch", "transformers"))
    return f"Made by `{command}` from commit `{COMMIT}` with {versions}, on {found['processor']}."


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; bars and line ends inside a cell are taken care of."""
    lines = [head, ["---"] * len(head), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def write_page(path: Path | str, title: str, made: str, *parts: str) -> Path:
    """reports/<path>: the title, `made_by(...)`, and the parts."""
    target = REPORTS / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n\n".join([f"# {title}", made, *filter(None, parts)]) + "\n", encoding="utf-8")
    print(f"wrote {target}")
    return target


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--list"]:
        print("\n".join(f"{name:17} {job.about}" for name, job in sorted(JOBS.items())))
        return 0
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not names or set(names) - set(JOBS):
        told = f"there is no {', '.join(name for name in names if name not in JOBS)}" if names else __doc__
        print(f"{told}: choose from {', '.join(sorted(JOBS))}", file=sys.stderr)
        return 2
    return max(run(name, arguments[len(names) :]) for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
