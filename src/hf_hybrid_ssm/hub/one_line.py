"""What an error says, as a terminal can show it."""

LONGEST = 1000  # letters


def in_one_line(message: object) -> str:
    """A text or an error without line breaks and without what else a terminal would obey, and no longer than anybody
    reads: it may quote a file that somebody else made.
    """
    words = " ".join((str(message) or type(message).__name__)[: 4 * LONGEST].split())
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]} ..."
