"""Reading the files of a folder that somebody else made.

Each is a regular file of the folder, not a device or a pipe, which could be endless, nor a link to what lies
elsewhere; and no larger than what such a file can sensibly be.
"""

import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_TEXT = 64 << 20  # bytes; the tokenizer.json of a vocabulary of 262,144 tokens has half of them
DEEPEST = 64  # levels of JSON
TEXTS = (".json", ".jinja", ".model", ".py", ".txt")
"""What this package or transformers reads as a whole, among the files of a checkpoint."""


def check_regular(path: Path, folder: Path | None = None) -> None:
    """The file can be read to its end, and lies in its folder, or in another one whose file it is.

    The cache of the Hub is such a folder too: its files are links to those of the same repository.

    Raises:
        ValueError: there is no such file, it is none, or a link leads out of the folder.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:  # links that lead nowhere or in a circle among them
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file, and is not read.")
    folder, target = (folder or path.parent).resolve(), path.resolve()
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if not target.is_relative_to(folder) and not target.is_relative_to(blobs):
        raise ValueError(f"{path} is a link that leads out of its folder, and is not read.")


def read_bytes(path: Path, at_most: int = LARGEST_TEXT) -> bytes:
    """What a file holds; the errors of `check_regular`, and a ValueError if it has more than `at_most` bytes."""
    check_regular(path)
    # a pipe that took its place in the meantime would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:
        content = file.read(at_most + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    if len(content) > at_most:
        raise ValueError(f"{path} has more than {at_most:,} bytes, the most that is read of such a file.")
    return content


def read_text(path: Path, at_most: int = LARGEST_TEXT) -> str:
    """What a file in UTF-8 holds; the errors of `read_bytes`, and a ValueError for other bytes."""
    try:
        return read_bytes(path, at_most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at position {error.start:,}.") from error


def read_any_json(path: Path, at_most: int = LARGEST_TEXT) -> Any:
    """The value of a JSON file; a ValueError that names the file if it holds none, or one of too many levels."""
    text = read_text(path, at_most)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: at most {DEEPEST} levels are read.") from None
    level: list[Any] = [content] if isinstance(content, dict | list) else []
    for _ in range(DEEPEST):
        values = itertools.chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level)
        level = [value for value in values if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"{path} is nested too deeply: at most {DEEPEST} levels are read.")
    return content


def read_json(path: Path, at_most: int = LARGEST_TEXT) -> dict[str, Any]:
    """As `read_any_json`, of a file that must hold an object."""
    value = read_any_json(path, at_most)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def check_readable(folder: Path) -> None:
    """Every file of a folder passes `check_regular`, and its texts have at most `LARGEST_TEXT` bytes: before
    transformers, which reads what it finds, is given the folder.

    Raises:
        ValueError: names the first that does not.
    """
    templates = folder / "additional_chat_templates"
    if templates.is_dir() and not templates.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{templates} is a link that leads out of its folder, and is not read.")
    for place in (folder, templates) if templates.is_dir() else (folder,):
        for path in sorted(place.iterdir()):
            if path.is_dir():
                continue
            check_regular(path, folder)
            if path.suffix in TEXTS and path.stat().st_size > LARGEST_TEXT:
                raise ValueError(f"{path} has more than {LARGEST_TEXT:,} bytes, the most that is read of such a file.")
