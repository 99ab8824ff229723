"""Escape text for Markdown."""

import re

HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
# what begins or ends something in a line of GitHub's Markdown; a line of its own begins nothing here, nor a bare link
SPECIAL = re.compile(r"[&<>]|[\\`*\[\]{}#!|~$@^=]|(?<=/)/|(?<!\w)_|_(?!\w)|(?<=www)\.|(?<=:)/", re.IGNORECASE)


def escaped(value: object) -> str:
    """A value, or those of a list, as one line of text: neither Markdown nor HTML, no link, and no end of a table's
    cell.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(escaped, value))}]"
    return SPECIAL.sub(lambda match: HTML.get(match[0], f"\\{match[0]}"), _in_one_line(value))


def code_span(value: object) -> str:
    """A value as code within a line, where nothing is Markdown or HTML."""
    line = _in_one_line(value)
    marks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{marks} {line} {marks}" if "`" in line else f"{marks}{line}{marks}"


def _in_one_line(value: object) -> str:
    return "".join(letter for letter in " ".join(str(value).split()) if letter.isprintable())
