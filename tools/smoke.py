"""A smoke test with other versions of the dependencies than the pinned ones.

    python -m tools.smoke lowest      the lowest transformers that pyproject.toml admits; a failure counts
    python -m tools.smoke resolved    what pip resolves without constraints at this moment; a failure is printed
    python -m tools.smoke pasted      the same versions and README.md's tasks, pasted into bash and zsh

What pip would change in this environment goes to a folder of its own, which comes first on Python's path; torch stays.
Then the committed checkpoints are put to use, exported and loaded without the package, and README.md's blocks run, in
two minutes. `pasted` pastes README.md's tasks instead, in a new environment and a new clone: some minutes for each of
these shells that is installed.
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [
    "tests/checkpoints/test_checkpoints.py::test_logits_and_greedy_text_are_golden",
    "tests/checkpoints/test_checkpoints.py::test_exported_they_say_the_same_where_the_package_is_missing",
    "tests/checkpoints/test_uses.py",
    "tests/test_documentation.py::test_blocks_of_the_first_page_run_alone",
    "tests/test_documentation.py::test_the_first_example_writes_what_is_shown_and_warns_of_nothing",
]
PASTED = ["tests/test_pasted_tasks.py"]
EXTRAS = ("train", "eval", "sft")


def requirements(kind: str) -> list[str]:
    """What pip is asked for: the lowest transformers, or all that README.md's installation asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = project["dependencies"]
    if kind == "lowest":
        (lowest,) = (found[1] for line in core if (found := re.match(r"transformers>=([\d.]+)", line)))
        return [f"transformers=={lowest}"]
    return [*core, *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]


def resolved(kind: str, work: Path) -> list[str]:
    """The packages, with versions, that pip would install here for that, and torch as it is."""
    constraints, report = work / "torch.txt", work / "report.json"
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report)]
    if kind != "lowest":
        command += ["--upgrade", "--upgrade-strategy", "eager"]
    subprocess.run([*command, "-c", str(constraints), *requirements(kind)], check=True)
    found = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return [f"{entry['name']}=={entry['version']}" for entry in found if entry["name"].lower() != "torch"]


def overlay(packages: list[str], folder: Path) -> None:
    if packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, *packages], check=True)


def run_tests(kind: str, folder: Path) -> int:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT / "src"))), "OMP_NUM_THREADS": "1"}
    tests = PASTED if kind == "pasted" else TESTS
    variables |= {"HF_HYBRID_SSM_PASTE": "1"} if kind == "pasted" else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("lowest", "resolved", "pasted"))
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "site-packages"  # by this name an environment made by a test takes it along
        packages = resolved(kind, Path(name))
        print(f"smoke test with the {kind} versions: {' '.join(packages) or 'those that are installed'}", flush=True)
        overlay(packages, folder)
        failed = run_tests(kind, folder)
    if failed and kind == "resolved":
        print("FAILED with what pip resolves today; this does not count, others release when they like", flush=True)
    return 0 if kind == "resolved" else failed


if __name__ == "__main__":
    sys.exit(main())
