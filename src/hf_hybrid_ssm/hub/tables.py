"""Tables of a folder's results.json, as Markdown: in cards, and for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_hybrid_ssm.hub.markdown import escaped
from hf_hybrid_ssm.hub.one_line import in_one_line

MOST = 100  # rows and columns that are shown of a table


@dataclass(frozen=True)
class Table:
    """What was measured.

    Attributes:
        title: a line above it, which says what the numbers are.
        columns: their names; the first is that of the rows.
        rows: cells as text.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        return markdown(self.title, self.columns, self.rows)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns as wide as their cells."""
    cells = [[_cell(value) for value in row] for row in (columns, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    lines = [
        " | ".join(value.ljust(width) if index == 0 else value.rjust(width) for index, (value, width) in pairs)
        for pairs in (list(enumerate(zip(row, widths))) for row in cells)
    ]
    rule = " | ".join("-" * width if index == 0 else "-" * (width - 1) + ":" for index, width in enumerate(widths))
    return "\n".join([f"{_cell(title)}\n", f"| {lines[0]} |", f"| {rule} |", *(f"| {line} |" for line in lines[1:])])


def tables_of(results: Mapping[str, Any]) -> list[Table]:
    """The tables that results.json holds under `tables`; validates the file, which may be untrusted.

    Raises:
        ValueError: they are not tables.
    """
    tables = results.get("tables", [])
    if not isinstance(tables, list) or len(tables) > MOST:
        raise ValueError(f"results.json: tables must be a list of at most {MOST} tables.")
    return [_table(each) for each in tables]


def _table(table: Any) -> Table:
    if not isinstance(table, dict) or table.keys() != {"title", "columns", "rows"}:
        raise ValueError("results.json: a table has a title, columns and rows, and nothing else.")
    columns, rows = table["columns"], table["rows"]
    lists = [columns, *rows] if isinstance(rows, list) else [rows]
    fits = all(isinstance(row, list) and 0 < len(row) == len(columns) <= MOST for row in lists) and len(rows) <= MOST
    if not fits or not all(isinstance(cell, str) for row in lists for cell in row):
        raise ValueError(f"results.json: rows and columns of a table are lists of as many texts, at most {MOST}.")
    return Table(str(table["title"]), columns, rows)


def _cell(text: str) -> str:
    return escaped(in_one_line(text)) if text else ""
