"""Results read, and tables written as Markdown."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown_table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def rows_of(found: dict[str, dict], *columns: str | Callable[[dict], Any]) -> list[list[Any]]:
    """A row for each name: columns are templates that are filled in from what was found, or functions of it."""
    return [
        [name, *(column.format(**each) if isinstance(column, str) else column(each) for column in columns)]
        for name, each in found.items()
    ]


def mebibytes(count: float, digits: int = 0) -> str:
    return f"{count / 2**20:,.{digits}f}"
