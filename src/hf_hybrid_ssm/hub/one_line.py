"""What an error says, as a terminal can show it."""

from collections.abc import Sequence

LONGEST = 1000  # letters


def in_one_line(message: object) -> str:
    """A text or an error without line breaks and without what else a terminal would obey, and no longer than anybody
    reads: it may quote a file that somebody else made.
    """
    words = " ".join((str(message) or type(message).__name__)[: 4 * LONGEST].split())
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ..."


def few(names: Sequence[str]) -> str:
    """The first three of several names, and how many there are besides."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
