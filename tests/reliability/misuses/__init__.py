"""Ways to use the public API wrongly, one file for each part of it; `tests.reliability.misuse` runs them all."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Misuse:
    """One kind of mistake and the answer it must get.

    Args:
        part: the part of the API.
        done: what the user does, in words; names a misuse within its part.
        provoke: does it, given an empty folder.
        expected: the exception types that are right.
        words: a regular expression that the message must contain: the argument, and the value or what is right.
    """

    part: str
    done: str
    provoke: Callable[[Path], object]
    expected: tuple[type[Exception], ...]
    words: str

    def __str__(self) -> str:
        return f"{self.part}: {self.done}"
