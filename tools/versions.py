"""The tests with the lowest versions of the dependencies that pyproject.toml names, or with the newest there are.

    python -m tools.versions lowest
    python -m tools.versions newest --python python3.13

Makes an environment and runs the tests in it. Left out are what needs several processes, transformers' own tests, the
documentation, the matrix and the measured plans: they belong to the pinned versions.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = [
    f"tests/{name}" for name in ("upstream", "distributed", "matrix", "test_documentation.py", "test_planning.py")
]


def requirements(kind: str) -> list[str]:
    """What pip is to install: with `==` instead of `>=` for the lowest, without bounds for the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core, extras = project["dependencies"], project["optional-dependencies"]
    names = [re.match(r"[\w-]+", line)[0] for line in (*core, *extras["train"], *extras["eval"], *extras["dev"])]  # type: ignore[index]
    if kind == "newest":
        return names
    lowest = {re.match(r"[\w-]+", line)[0]: re.search(r">=([\w.]+)", line)[1] for line in core}  # type: ignore[index]
    return [f"{name}=={lowest[name]}" if name in lowest else name for name in names]


def environment(folder: Path, kind: str, python: str) -> Path:
    """The interpreter of a new environment in `folder`, or of the one that is there."""
    executable = folder / "bin" / "python"
    if not executable.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(executable), "-m", "pip", "install", "--quiet", *requirements(kind)], check=True)
    return executable


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("lowest", "newest"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--environment", type=Path, help="a folder to make it in, or one that has it")
    arguments = parser.parse_args()
    folder = arguments.environment or Path(tempfile.mkdtemp(prefix=f"{arguments.kind}-"))
    executable = environment(folder, arguments.kind, arguments.python)
    subprocess.run([str(executable), "-m", "pip", "list"], check=True)
    command = [str(executable), "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider"]
    command += [f"--ignore={name}" for name in LEFT_OUT]
    variables = os.environ | {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
