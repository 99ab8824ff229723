"""What a column of the matrix is: one question to another library, asked of every row."""

from collections.abc import Callable
from dataclasses import dataclass

Check = Callable[[str], None]


class NotInstalled(Exception):
    """The other library is not here: the cell stays open, it is neither yes nor no."""


@dataclass(frozen=True)
class Column:
    """One question.

    Args:
        name: the head of the column.
        check: takes the name of a row (see `rows.py`) and returns if the answer is yes; whatever it raises is the
            answer otherwise.
        library: the distribution that is asked, to be named with its version.
        needs: further distributions without which the question cannot be asked.
    """

    name: str
    check: Check
    library: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """The columns of one table, and what their "yes" means."""

    title: str
    meaning: str
    columns: tuple[Column, ...]
