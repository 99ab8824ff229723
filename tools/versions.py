"""Tests with other versions of the dependencies than the pinned ones.

    python -m tools.versions lowest      all tests with the lowest versions of pyproject.toml, in a new environment
    python -m tools.versions newest --python python3.13    and with the newest there are
    python -m tools.versions smoke       two minutes: what pip resolves today, then the lowest transformers
    python -m tools.versions triton --only 3.6.0    the kernels with versions of Triton (all: some hours)

`smoke` and `triton` put other packages into a folder of their own, which comes first on Python's path; torch stays. A
failure with what pip resolves today is printed and does not count, since others release when they like. The tests in a
new environment leave out what belongs to the pinned versions: several processes, transformers' own tests, the
documentation, the matrix and the measured plans.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = [
    f"tests/{name}" for name in ("upstream", "distributed", "matrix", "test_documentation.py", "test_planning.py")
]
SMOKE = (
    "tests/checkpoints/test_checkpoints.py::test_logits_and_greedy_text_are_golden",
    "tests/checkpoints/test_checkpoints.py::test_exported_they_say_the_same_where_the_package_is_missing",
    "tests/checkpoints/test_uses.py",
    "tests/test_documentation.py::test_python_runs[README.md-0]",
    "tests/test_documentation.py::test_python_runs[README.md-1]",
    "tests/test_documentation.py::test_the_first_example_writes_what_is_shown_and_warns_of_nothing",
)
KERNELS = ("tests/ops/test_triton.py", "tests/ops/test_kernel_limits.py")
TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Of each minor version from the floor in pyproject.toml on, the last."""


def pip(*arguments: object, python: object = sys.executable) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *map(str, arguments)], check=True)


def tested(paths: Iterable[object], *arguments: str, python: object = sys.executable, **environment: str) -> int:
    """The status of pytest with these before what Python finds."""
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def asked_for() -> tuple[list[str], dict[str, list[str]]]:
    """The lines of pyproject.toml: of the package, and of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"], project["optional-dependencies"]


def name_of(line: str) -> str:
    return re.match(r"[\w-]+", line)[0]  # type: ignore[index]


def floors() -> dict[str, str]:
    return {name_of(line): re.search(r">=([\w.]+)", line)[1] for line in asked_for()[0]}  # type: ignore[index]


def in_a_new_environment(kind: str, python: str, folder: Path) -> int:
    """`==` instead of `>=` for the lowest, without bounds for the newest; an environment that is there is taken."""
    core, extras = asked_for()
    names = map(name_of, (*core, *extras["train"], *extras["eval"], *extras["dev"]))
    lowest = floors() if kind == "lowest" else {}
    executable = folder / "bin" / "python"
    if not executable.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip(*(f"{name}=={lowest[name]}" if name in lowest else name for name in names), python=executable)
    subprocess.run([executable, "-m", "pip", "list"], check=True)
    return tested(["src"], "tests", *(f"--ignore={name}" for name in LEFT_OUT), python=executable)


def smoke(*wanted: str) -> int:
    """With what pip would install here for that, but for torch."""
    with tempfile.TemporaryDirectory() as name:
        work, folder = Path(name), Path(name) / "site-packages"
        constraints, report = work / "torch.txt", work / "report.json"
        constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
        pip("--dry-run", "--report", report, "-c", constraints, *wanted)
        found = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
        packages = [f"{each['name']}=={each['version']}" for each in found if each["name"].lower() != "torch"]
        print(f"smoke test with {' '.join(packages) or 'what is installed'}", flush=True)
        if packages:
            pip("--no-deps", "--target", folder, *packages)
        return tested([folder, ROOT / "src"], *SMOKE)


def triton(versions: Iterable[str]) -> int:
    failed = []
    for version in versions:
        folder = ROOT / "build" / "triton" / version
        if not (folder / "triton").is_dir():
            pip("--no-deps", "--target", folder, f"triton=={version}")
        if tested([folder], *KERNELS, TRITON_CACHE_DIR=str(folder.with_name(f"cache-{version}"))):
            failed.append(version)
    print(f"Triton {', '.join(failed)}: tests failed" if failed else "every version passes")
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("lowest", "newest", "smoke", "triton"))
    parser.add_argument("--python", default=sys.executable, help="of a new environment")
    parser.add_argument("--environment", type=Path, help="a folder to make it in, or one that has it")
    parser.add_argument("--only", nargs="+", default=TRITON, help="these versions of Triton")
    options = parser.parse_args()
    if options.kind == "triton":
        return triton(options.only)
    if options.kind == "smoke":
        core, extras = asked_for()
        today = (*core, *(line for extra in ("train", "eval", "sft") for line in extras[extra]))
        if smoke("--upgrade", "--upgrade-strategy", "eager", *today):
            print("FAILED with what pip resolves today; this does not count", flush=True)
        return smoke(f"transformers=={floors()['transformers']}")
    folder = options.environment or Path(tempfile.mkdtemp(prefix=f"{options.kind}-"))
    return in_a_new_environment(options.kind, options.python, folder)


if __name__ == "__main__":
    sys.exit(main())
