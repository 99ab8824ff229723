"""The kernels with every version of Triton that pyproject.toml admits: interpreted, and compiled for cards.

    python -m tools.triton_versions                  all of them (some hours with HF_HYBRID_SSM_THOROUGH=1)
    python -m tools.triton_versions --only 3.6.0

Each version is installed into a folder of its own in build/triton, which goes before the environment's packages.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/ops/test_triton.py", "tests/ops/test_kernel_limits.py")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=VERSIONS, help="these versions")
    options, failed = parser.parse_args(), []
    for version in options.only:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        if subprocess.run(command, cwd=ROOT, env=environment(version), check=False).returncode:
            failed.append(version)
    print(f"Triton {', '.join(failed)}: tests failed" if failed else "every version passes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
