"""Random calls and misuse of the C kernels under the compiler's sanitizers for addresses and undefined behaviour.

python -m tests.ops.sanitize --seconds 600              # every op
python -m tests.ops.sanitize --cases 5 system_token     # a few cases of one

A finding ends the run with the sanitizer's report and status 1. The kernels are compiled into a folder of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.core.native_build import _compiler
from tests.ops.misuse_cases import MEANT, REFUSED
from tests.ops.random_cases import CASES, deviation

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
LIMITS = {"attention": 2e-3}  # gradients that are nothing but rounding, beside a hundredth of the largest
LIMIT = 2e-4


def missing_sanitizer() -> str | None:
    """None if the compiler has what is needed, else what it lacks."""
    return None if _library("libasan.so") else "the compiler has no libasan"


def _library(name: str) -> str | None:
    """The path of one of the compiler's libraries."""
    command = [*(_compiler() or ("cc",)), f"-print-file-name={name}"]
    try:
        named = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return named if Path(named).is_absolute() and Path(named).exists() else None


def run(names: list[str], *, seconds: float = 0.0, cases: int = 0) -> subprocess.CompletedProcess:
    """The cases in a process of its own, whose kernels are instrumented."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder, "cc")
        real = " ".join(_compiler() or ("cc",))
        compiler.write_text(f'#!/bin/sh\nexec {real} "$@" -O1 -g {SANITIZERS}\n', encoding="utf-8")
        compiler.chmod(0o700)
        # libasan looks up the C++ library's exceptions when it is loaded, and importing Triton throws one
        loaded_first = [path for path in map(_library, ("libasan.so", "libstdc++.so.6")) if path is not None]
        environment = os.environ | {
            "CC": str(compiler),
            "HF_HYBRID_SSM_CACHE": str(Path(folder, "kernels")),
            "LD_PRELOAD": ":".join(loaded_first),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "OMP_NUM_THREADS": "2",
        }
        command = [sys.executable, "-m", "tests.ops.sanitize", "--inside", "--seconds", str(seconds), *names]
        return subprocess.run([*command, "--cases", str(cases)], env=environment, check=False)


def inside(names: list[str], seconds: float, cases: int) -> None:
    """Until the time is over, and at least `cases` of each."""
    end, seed = time.monotonic() + seconds, 0
    while seed < cases or time.monotonic() < end:
        for name in names:
            found = deviation(name, seed)
            assert found <= LIMITS.get(name, LIMIT), f"{name}, case {seed}: off by {found:.1e}"
        seed += 1
    print(f"{seed} cases of each of {', '.join(names)}: nothing found")


def misuse() -> None:
    """All of the table, by the C kernels."""
    for name, (call, error, _) in REFUSED.items():
        try:
            call("native")
        except error:
            continue
        raise AssertionError(f"{name} was not refused")
    for call, _ in MEANT.values():
        call("native")
    print(f"{len(REFUSED)} refused, {len(MEANT)} odd calls: nothing found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of: {', '.join(CASES)}; default: all, and misuse"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="for how long to draw cases")
    parser.add_argument("--cases", type=int, default=0, help="how many to draw at least")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(CASES)):
        parser.error(f"{unknown} are not among {list(CASES)}")
    if not arguments.inside:
        if reason := missing_sanitizer():
            sys.exit(reason)
        sys.exit(run(arguments.names, seconds=arguments.seconds, cases=arguments.cases).returncode)
    for op in REGISTRY.values():  # a kernel that fails is to be heard of, not replaced
        if "native" in op.kernels and not arguments.names:
            assert op.explain("cpu", torch.float32)["native"] == "runs", op.name
    if not arguments.names:
        misuse()
    inside(arguments.names or list(CASES), arguments.seconds, arguments.cases)


if __name__ == "__main__":
    main()
