"""The tests with the lowest versions of the dependencies that pyproject.toml names, or with the newest there are.

    python -m tools.versions lowest
    python -m tools.versions newest --python python3.13

Makes an environment, runs the tests in it, and writes reports/reliability/versions.md (a row each). Left out are what
needs several processes, transformers' own tests, the documentation, the matrix and the measured plans: they belong to
the pinned versions.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.reporting import REPORTS, made_by, table, write_page

ROOT = Path(__file__).parents[1]
LEFT_OUT = [
    f"tests/{name}" for name in ("upstream", "distributed", "matrix", "test_documentation.py", "test_planning.py")
]
SHOWN = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "peft", "datasets", "numpy")


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


def run_tests(executable: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of pytest's last line, and the names of what failed."""
    command = [str(executable), "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider", "-rfE"]
    command += [f"--ignore={name}" for name in LEFT_OUT]
    variables = os.environ | {"PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False).stdout
    lines = printed.splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}, failed


def versions_in(executable: Path) -> dict[str, str]:
    code = "import json, sys, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    found = json.loads(subprocess.check_output([str(executable), "-c", code, *SHOWN], text=True))
    python = subprocess.check_output([str(executable), "--version"], text=True)
    return {"python": python.split()[1], **found}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("lowest", "newest"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--environment", type=Path, help="a folder to make it in, or one that has it")
    arguments = parser.parse_args()
    folder = arguments.environment or Path(tempfile.mkdtemp(prefix=f"{arguments.kind}-"))
    executable = environment(folder, arguments.kind, arguments.python)
    counts, failed = run_tests(executable)
    path = REPORTS / "reliability" / "versions.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known[arguments.kind] = {"versions": versions_in(executable), "counts": counts, "failed": failed}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    outcomes = ("passed", "failed", "skipped")
    rows = [
        [kind, *found["versions"].values(), *(found["counts"].get(name, 0) for name in outcomes)]
        for kind, found in known.items()
    ]
    failures = [f"- {kind}: {name}" for kind, found in known.items() for name in found["failed"]]
    write_page(
        "reliability/versions.md",
        "Lowest and newest versions",
        made_by(f"python -m tests.reporting {arguments.kind}", ("src", "tests", "pyproject.toml")),
        "The tests in environments of their own. What needs several processes, "
        "transformers' own tests, the documentation's, the matrix's and those of the plans are left out; `make test` "
        "runs all with pinned versions.",
        table(["versions", "python", *SHOWN, *outcomes], rows),
        "\n".join(failures) or "Nothing failed.",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
