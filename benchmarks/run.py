"""Run benchmarks, each in a process of its own, then render tables and figures of README.md and docs/ from them.

python benchmarks/run.py            # all of them, in order
python benchmarks/run.py --list     # what there is, and the question each answers
python benchmarks/run.py longhorn_scan decoding
python benchmarks/run.py --device cuda decoding     # on a GPU: results/gpu_NAME.json, no tables
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
# Threads that wait in a loop for each other cost whole seconds a step wherever another program takes a core away.
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"} | os.environ
# in this order: ops, layers, models
BENCHMARKS = (
    "longhorn_scan",
    "local_attention",
    "training",
    "decoding",
    "weight_only",
    "long_context",
    "comparison",
)


def question(name: str) -> str:
    """The first paragraph of the script's docstring."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(BENCHMARKS)):
        parser.error(f"{unknown} are not among {list(BENCHMARKS)}")
    failed = []
    for name in arguments.names or BENCHMARKS:
        print(f"== {name}: {question(name)}", flush=True)
        if arguments.list:
            continue
        begin = time.perf_counter()
        command = [sys.executable, FOLDER / f"{name}.py", "--device", arguments.device]
        if subprocess.run(command, check=False, env=ENVIRONMENT).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - begin:.0f} s", flush=True)
    if not arguments.list and arguments.device == "cpu":
        for script in ("tables.py", "pictures.py"):
            subprocess.run([sys.executable, FOLDER / script], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
