"""Asks every cell of the matrix, and writes docs/matrix.md: `python -m tests.matrix.report`.

Ends with an error if a cell is red and no limit of another library (`limits.py`) explains it.
"""

import argparse
import os
import sys
from importlib import import_module, metadata
from pathlib import Path

import hf_hybrid_ssm
from tests.matrix.cells import Answer, ask, missing
from tests.matrix.columns import Group
from tests.matrix.footnotes import Footnotes
from tests.matrix.rows import ROWS
from tests.reliability.reporting import table

GROUPS = ("peft", "offloading", "compiling")
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
INTRODUCTION = """\
What the libraries around transformers do with every family of this package, on tiny models on a CPU. A cell says yes
when the check named under its table passed; otherwise it has the number of an error, told at the end in one line with
the limit of the library behind it. Made by `python -m tests.matrix.report` (its further libraries:
`pip install -r tests/matrix/requirements.txt`); the checks are in `tests/matrix/`."""

Answers = dict[tuple[str, str], Answer]


def groups(names: tuple[str, ...] | list[str] = GROUPS) -> list[Group]:
    return [import_module(f"tests.matrix.{name}").GROUP for name in names]


def ask_group(group: Group, rows: list[str], time_limit: float) -> Answers:
    """(row, name of the column) → answer."""
    answers = {}
    for row in rows:
        for column in group.columns:
            answer = answers[row, column.name] = ask(column, row, time_limit)
            print(f"{row} | {column.name} | {answer.seconds:.1f} s | {answer.error or 'yes'}", flush=True)
    return answers


def section(group: Group, rows: list[str], answers: Answers, footnotes: Footnotes) -> str:
    """A heading, the table, and what its yes means."""
    cells = [[row, *(footnotes.mark(row, c, answers[row, c.name]) for c in group.columns)] for row in rows]
    head = ["", *(column.name for column in group.columns)]
    return f"## {group.title}\n\n{table(head, cells)}\n\n{group.meaning}"


def versions(asked: list[Group]) -> str:
    names = {"torch", "transformers"}
    for column in (column for group in asked for column in group.columns):
        names.update({column.library, *column.needs} - set(missing(column)))
    return "Made with " + ", ".join(f"{name} {metadata.version(name)}" for name in sorted(names)) + "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="+", default=GROUPS, choices=GROUPS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--time-limit", type=float, default=300, help="seconds a cell may take")
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a cell is a forked process, and starts none of its own

    for name in hf_hybrid_ssm.__all__:  # every cell asks the code as it was when the report began
        getattr(hf_hybrid_ssm, name)

    asked, footnotes = groups(options.groups), Footnotes()
    sections = [
        section(group, options.rows, ask_group(group, options.rows, options.time_limit), footnotes) for group in asked
    ]
    if footnotes.lines:
        sections.append("## What is not yes\n\n" + footnotes.text())
    options.page.write_text(
        "\n\n".join(["# The ecosystem, cell by cell", INTRODUCTION, *sections, versions(asked)]) + "\n",
        encoding="utf-8",
    )
    print(f"wrote {options.page}")
    if footnotes.unexplained:
        sys.exit("No limit of another library explains:\n" + "\n".join(footnotes.unexplained))


if __name__ == "__main__":
    main()
