"""Asks every cell of the matrix, and writes docs/matrix.md: `python -m tests.matrix.report`.

`--groups`, `--columns` and `--rows` ask a part anew; docs/matrix.json has the answers of the rest. Ends with an error
if a cell is red and no limit of another library (`limits.py`) explains it.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from importlib import import_module, metadata
from pathlib import Path

import hf_hybrid_ssm
from tests.matrix.cells import Answer, ask, missing
from tests.matrix.columns import Column, Group
from tests.matrix.footnotes import Footnotes
from tests.matrix.rows import ROWS
from tests.reliability.reporting import table

GROUPS = ("peft", "quantization", "compiling", "exporting", "offloading", "heads")
PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
ANSWERS = PAGE.with_suffix(".json")
INTRODUCTION = """\
What the libraries around transformers do with every family of this package, on tiny models on a CPU. A cell says yes
when the check named under its table passed; otherwise it has the number of an error, told at the end in one line with
the limit of the library behind it; "-" was not asked. Made by `python -m tests.matrix.report` (its further libraries:
`pip install -r tests/matrix/requirements.txt`); the checks are in `tests/matrix/`."""

Answers = dict[str, dict[str, Answer]]  # name of the column → row → answer


def group_of(name: str) -> Group:
    return import_module(f"tests.matrix.{name}").GROUP


def ask_row(columns: list[Column], row: str, time_limit: float) -> dict[str, Answer]:
    """Name of the column → answer."""
    answers = {}
    for column in columns:
        answer = answers[column.name] = ask(column, row, time_limit)
        print(f"{row} | {column.name} | {answer.seconds:.1f} s | {answer.error or 'yes'}", flush=True)
    return answers


def section(group: Group, answers: Answers, footnotes: Footnotes) -> str:
    """A heading, the table, and what its yes means."""
    cells = [
        [row, *(footnotes.mark(row, column, answers.get(column.name, {}).get(row)) for column in group.columns)]
        for row in ROWS
    ]
    head = ["", *(column.name for column in group.columns)]
    return f"## {group.title}\n\n{table(head, cells)}\n\n{group.meaning}"


def page(groups: dict[str, Group], answers: dict[str, Answers], footnotes: Footnotes) -> str:
    sections = [section(groups[name], answers[name], footnotes) for name in GROUPS if name in answers]
    if footnotes.lines:
        sections.append("## What is not yes\n\n" + footnotes.text())
    libraries = {"torch", "transformers"}
    for column in (column for name in answers for column in groups[name].columns):
        libraries.update({column.library, *column.needs} - set(missing(column)))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in sorted(libraries))
    return "\n\n".join(["# The ecosystem, cell by cell", INTRODUCTION, *sections, f"Made with {versions}."]) + "\n"


def held(path: Path) -> dict[str, Answers]:
    """The answers of earlier reports."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {
        group: {column: {row: Answer(**answer) for row, answer in rows.items()} for column, rows in columns.items()}
        for group, columns in content.items()
    }


def keep(path: Path, answers: dict[str, Answers]) -> None:
    content = {
        group: {column: {row: asdict(answer) for row, answer in rows.items()} for column, rows in columns.items()}
        for group, columns in answers.items()
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="*", default=GROUPS, choices=GROUPS)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--columns", nargs="*", help="names; by default all of the groups")
    parser.add_argument("--time-limit", type=float, default=900, help="seconds a cell may take")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a cell is a forked process, and starts none of its own
    for name in hf_hybrid_ssm.__all__:  # every cell asks the code as it was when the report began
        getattr(hf_hybrid_ssm, name)

    groups = {name: group_of(name) for name in GROUPS}
    for name in options.groups:
        columns = [c for c in groups[name].columns if options.columns is None or c.name in options.columns]
        for row in options.rows:
            asked = ask_row(columns, row, options.time_limit)
            answers = held(ANSWERS)
            for column, answer in asked.items():
                answers.setdefault(name, {}).setdefault(column, {})[row] = answer
            keep(ANSWERS, answers)

    footnotes = Footnotes()
    PAGE.write_text(page(groups, held(ANSWERS), footnotes), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
    if footnotes.unexplained:
        sys.exit("No limit of another library explains:\n" + "\n".join(footnotes.unexplained))


if __name__ == "__main__":
    main()
