"""What is run seldom, by name: `python -m tests.reporting NAME`. Further arguments go to the first command of a job.

Pages made from tests are jobs too, and stand in `tests.reporting.PAGES`.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
UPSTREAM = "HF_HYBRID_SSM_UPSTREAM_TESTS"
PROCESSOR_TESTS = "tests/ops tests/layers tests/models tests/golden tests/invariants"


@dataclass(frozen=True)
class Job:
    """What it is for; commands without `python`, run in order until one fails; their environment.

    Args:
        threads: those of OpenMP; None leaves the environment as it is.
        needs_upstream: whether transformers' own tests are downloaded first.
        removes: a page of an earlier run, which the first command refuses to overwrite.
    """

    about: str
    commands: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    threads: int | None = 1
    needs_upstream: bool = False
    removes: str | None = None


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
        threads=None,
    ),
    "upstream": Job(
        "transformers' own model tests on the families, with a page",
        ("-m tests.upstream.report",),
        needs_upstream=True,
    ),
    "invariants": Job(
        "10,000 random cases of every batching invariance, with a page", ("-m tests.invariants.run --cases 10000",)
    ),
    "programs": Job(
        "10,000 random programs on models and their caches, with a page",
        (
            "-m tests.programs.run --cases 10000 --report reports/programs",
            "-m tests.reporting --stamp reports/programs.md",
        ),
    ),
    "streaming": Job(
        "a million tokens in constant memory, with the curve",
        ("benchmarks/streaming.py --tokens 1000000",),
        threads=None,
    ),
    "bench": Job("the benchmarks; results in benchmarks/results", ("benchmarks/run.py",), threads=None),
    "operation-counts": Job("operations of a layer, with a page", ("-m tests.models.operation_counts",)),
    "plans": Job(
        "memory and operations of a training step of the papers' presets, with a page",
        (
            "-m hf_hybrid_ssm plan --markdown reports/planning.md",
            "-m tests.reporting --stamp reports/planning.md",
        ),
        threads=None,
        removes="reports/planning.md",
    ),
    "mutation": Job(
        "change the package and the recipes at random and see whether a test notices",
        ("-m tools.mutation --sample 400",),
    ),
    "faults": Job("make a list of faults, one at a time, and see whether their tests notice", ("-m tools.faults",)),
    # What needs several processes, and transformers' own tests, belong to the pinned versions.
    "lowest": Job("the tests with the lowest versions of the dependencies", ("-m tools.versions lowest",)),
    "newest": Job("the tests with the newest versions of the dependencies", ("-m tools.versions newest",)),
    # With what pip resolves today a failure is only told; with the lowest transformers it counts.
    "smoke": Job(
        "two minutes with the lowest transformers, and with what pip resolves today",
        ("-m tools.smoke resolved", "-m tools.smoke lowest"),
        threads=None,
    ),
    "pasted": Job(
        "README.md's tasks with what pip resolves today, pasted into bash and zsh (some minutes a shell)",
        ("-m tools.smoke pasted",),
        threads=None,
    ),
    "triton": Job(
        "the kernels with every version of Triton that is admitted: interpreted, compiled, counted (hours)",
        ("-m tools.triton_versions",),
        threads=None,
    ),
    "build": Job("the wheel and the source distribution in dist/", ("-m hatchling build",), threads=None),
    "reports-status": Job(
        "which pages in reports/ are older than the sources they are about", ("-m tests.reporting",), threads=None
    ),
    "cards": Job("the model cards of the papers' language models", ("tools/model_cards.py",), threads=None),
    "clean-room": Job(
        "exported folders in a new environment that lacks the package, lm-eval's own command included",
        ("-m pytest tests/hub/test_clean_environment.py",),
        (("HF_HYBRID_SSM_CLEAN_ROOM", "1"),),
    ),
}


def run_job(name: str, arguments: list[str]) -> int:
    """The status of the first command that fails, or 0."""
    job = JOBS[name]
    environment = os.environ | dict(job.environment)
    if job.threads is not None:
        environment["OMP_NUM_THREADS"] = str(job.threads)
    if job.needs_upstream and UPSTREAM not in environment:
        fetched = subprocess.run(
            [sys.executable, "tests/upstream/fetch.py"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
        )
        if fetched.returncode != 0:
            return fetched.returncode
        environment[UPSTREAM] = fetched.stdout.strip()
    if job.removes is not None:
        (ROOT / job.removes).unlink(missing_ok=True)
    for number, command in enumerate(job.commands):
        words = [sys.executable, *shlex.split(command), *(arguments if number == 0 else [])]
        if status := subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
            return status
    return 0
