"""Do the tests notice when ops and caches are changed? Mutants by mutmut, a random sample of them.

    pip install mutmut && python -m tools.mutation --sample 400

Works on a copy of the sources and writes reports/reliability/mutation.md. A mutant is killed if a test fails with it.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tests.reporting import made_by, table, write_page

ROOT = Path(__file__).parents[1]
# Kernels are out of mutmut's reach: Triton's run in a process of their own, and decorated functions are not changed.
# So are tests that compile: its detours around every function are none that torch traces.
SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/hf_hybrid_ssm/ops/*", "src/hf_hybrid_ssm/models/cache.py"]
do_not_mutate = ["*/triton*.py", "*/native.py", "*/native_library.py"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-q", "-k", "not compil and not graph and not export and not traced"]
pytest_add_cli_args_test_selection = [
    "tests/ops", "tests/layers/test_lmu.py", "tests/models/test_longhorn.py", "tests/models/test_lmu_isa.py",
    "tests/models/test_bst.py", "tests/test_doctor.py", "--deselect=tests/ops/test_triton.py"
]
also_copy = ["tests", "recipes", "benchmarks"]
"""
MEANING = {1: "killed", 3: "killed", 0: "survived", 5: "not covered", 33: "not covered"}
KILLED = ("killed", "hung", "crashed")


def status(exit_code: int | None) -> str:
    """A mutant that hangs or crashes the tests is noticed as well."""
    if exit_code in MEANING:
        return MEANING[exit_code]
    return "hung" if exit_code in (36, 24, -24, 152, 255) else "crashed"


def copied(folder: Path) -> None:
    """What mutmut needs, and its settings at the end of pyproject.toml."""
    for name in ("src", "tests", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + SETTINGS
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "README.md", folder)


def mutmut(folder: Path, names: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [
        str(Path(sys.executable).with_name("mutmut")),
        "run",
        "--max-children",
        str(os.cpu_count() or 1),
        *names,
    ]
    subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)


def codes(folder: Path) -> dict[str, dict[str, int | None]]:
    """File → mutant → exit code of its tests, None if they did not run."""
    found = {}
    for path in sorted((folder / "mutants").rglob("*.meta")):
        by_name = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
        if by_name:
            name = path.relative_to(folder / "mutants" / "src" / "hf_hybrid_ssm").as_posix()
            found[name.removesuffix(".meta")] = by_name
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a folder of an earlier run, to go on with")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="mutation-"))
    if not (folder / "mutants").is_dir():
        folder.mkdir(exist_ok=True)
        copied(folder)
        # makes all, and finds who tests whom
        mutmut(folder, ["hf_hybrid_ssm.ops._core.checks.x_check_lengths__mutmut_1"])
    everything = [name for by_name in codes(folder).values() for name in by_name]
    if not everything:
        sys.exit(f"mutmut made no mutants in {folder}")
    sample = set(random.Random(arguments.seed).sample(sorted(everything), min(arguments.sample, len(everything))))
    verdicts = {name for by_name in codes(folder).values() for name, code in by_name.items() if code is not None}
    if sample - verdicts:
        mutmut(folder, sorted(sample - verdicts))
    rows: list[list] = []
    survivors: list[str] = []
    total: Counter[str] = Counter()
    for file, by_name in codes(folder).items():
        found = Counter(status(code) for name, code in by_name.items() if name in sample and code is not None)
        survivors += [name for name, code in by_name.items() if name in sample and code == 0]
        total += found
        noticed = sum(found[kind] for kind in KILLED)
        rows.append([file, len(by_name), sum(found.values()), noticed, found["survived"], found["not covered"]])
    tried, noticed = sum(total.values()), sum(total[kind] for kind in KILLED)
    if not tried:
        sys.exit(f"mutmut tried no mutant; run it in {folder} to see why")
    grouped: dict[str, list[int]] = {}
    for file, *counts in rows:  # by op, where all files of one are alike
        key = "/".join(file.split("/")[:2])
        grouped[key] = [sum(pair) for pair in zip(grouped.get(key, [0] * len(counts)), counts)]
    shown = [[key, *counts] for key, counts in grouped.items()]
    shown.append(["all", len(everything), tried, noticed, total["survived"], total["not covered"]])
    head = ["file", "mutants", "tried", "noticed", "survived", "not covered"]
    path = write_page(
        "reliability/mutation.md",
        "What the tests of ops and caches notice",
        made_by("make mutation", ("src/hf_hybrid_ssm/ops", "src/hf_hybrid_ssm/models/cache.py", "tests/ops")),
        f"{tried} of the {len(everything):,} mutants that mutmut {version('mutmut')} makes, drawn "
        f"with seed {arguments.seed}, against the tests of the ops, of the Legendre memory, of Longhorn, LMU-ISA and "
        f"BST. **{noticed} were noticed, {noticed / tried:.1%}** (a test failed, hung or crashed).",
        table(head, shown),
        "Each file is in `mutation.json`.",
        "Survivors: " + (", ".join(f"`{name.removeprefix('hf_hybrid_ssm.')}`" for name in survivors) or "none") + ".",
        "Kernels are not among them: mutmut changes no decorated function, and Triton's interpreter runs in a process "
        "of its own.",
    )
    path.with_suffix(".json").write_text(json.dumps([dict(zip(head, row)) for row in rows], indent=1) + "\n")
    print(f"{noticed} of {tried}; mutants in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
