"""The kernels with every version of Triton that pyproject.toml admits: interpreted, compiled, counted for the page.

    python -m tools.triton_versions                     all of them, for every generation of cards (several hours)
    python -m tools.triton_versions --only 3.6.0 --capability 90
    python -m tools.triton_versions --limits --seconds 600    ten minutes more of what every launch shares and spills

Each version is installed into a folder of its own in build/triton, which goes before the environment's packages.
`tests/ops/test_triton.py` runs in Triton's interpreter and compiles for cards that are not here; then
`benchmarks/kernel_evidence.py` writes that version's part of reports/kernel_evidence.json, and the page, and
`benchmarks/kernel_limits.py` that of reports/kernel_limits.json: every launch, up to 256 states, of which those
that are on record are not compiled again.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Of each minor version from the floor in pyproject.toml on, the last."""


def environment(version: str) -> dict[str, str]:
    """Variables under which Python imports this version, which is installed if it is not there."""
    folder = ROOT / "build" / "triton" / version
    if not (folder / "triton").is_dir():
        command = ["pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"triton=={version}"]
        subprocess.run([sys.executable, "-m", *command], check=True)
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    cache = {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton" / f"cache-{version}")}
    return os.environ | cache | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def compile_launches(versions: Sequence[str], capabilities: Sequence[str], seconds: float | None) -> None:
    """One version after the other, until `seconds` are over."""
    begin = time.time()
    for version in versions:
        command = [sys.executable, "-m", "benchmarks.kernel_limits"]
        command += ["--capability", *capabilities] if capabilities else []
        command += [] if seconds is None else ["--seconds", str(begin + seconds - time.time())]
        subprocess.run(command, cwd=ROOT, env=environment(version), check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=VERSIONS, help="these versions")
    parser.add_argument("--capability", nargs="+", default=[], help="count for these generations of cards alone")
    parser.add_argument("--limits", action="store_true", help="only shared memory and spills of every launch")
    parser.add_argument("--seconds", type=float, help="of `--limits`: end after so long, in the middle if need be")
    options = parser.parse_args()
    if options.limits:
        compile_launches(options.only, options.capability, options.seconds)
        return 0
    chosen = [argument for capability in options.capability for argument in ("--capability", capability)]
    failed = []
    for version in options.only:
        variables = environment(version)
        counted = [sys.executable, "benchmarks/kernel_evidence.py", *chosen]
        subprocess.run(counted, cwd=ROOT, env=variables, check=True)
        compile_launches([version], options.capability, None)
        tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_triton.py"]
        if subprocess.run(tested, cwd=ROOT, env=variables, check=False).returncode:
            failed.append(version)
    print(f"Triton {', '.join(failed)}: tests failed" if failed else "every version passes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
