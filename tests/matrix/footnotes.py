"""Numbers the errors of a report, and says each in one line with the limit behind it."""

from importlib import metadata

from tests.matrix.cells import Answer
from tests.matrix.columns import Column
from tests.matrix.limits import limit_behind

LONGEST_ERROR = 300


class Footnotes:
    """One number for all cells of a column that are red for the same reason."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self.lines: list[str] = []
        self.unexplained: list[str] = []

    def mark(self, row: str, column: Column, answer: Answer | None) -> str:
        """What the cell shows; "-" without an answer."""
        if answer is None:
            return "-"
        if answer.kind == "yes":
            return "yes"
        limit = limit_behind(column.name, answer.error)
        reason = limit.reason if limit else answer.error
        if (column.name, reason) not in self._numbers:
            self._numbers[column.name, reason] = len(self._numbers) + 1
            self.lines.append(_line(column, answer))
        if answer.kind == "no" and limit is None:
            self.unexplained.append(f"{row}, {column.name}: {answer.error}")
        return f"{answer.kind} [{self._numbers[column.name, reason]}]"

    def text(self) -> str:
        return "\n".join(f"{number}. {line}" for number, line in enumerate(self.lines, 1))


def _line(column: Column, answer: Answer) -> str:
    error = answer.error if len(answer.error) <= LONGEST_ERROR else answer.error[:LONGEST_ERROR] + " ..."
    line = f"**{column.name}**: `{error.replace('`', chr(39))}`"
    limit = limit_behind(column.name, answer.error)
    if limit is None:
        return line
    return f"{line} {limit.library} {_version(limit.library)}: {limit.reason}"


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:  # answers of an earlier report, told without the library
        return "(not installed)"
