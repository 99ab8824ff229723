"""Files that are whole or not there: written beside their place, and then moved into it.

A full disk, an interruption or a crash leaves what was there. A link is replaced, and where it leads stays as it is.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """A new empty file beside `path`, to be filled; it takes that place at the end, unless there was an error.

    It has the mode of the file that it replaces, and that of any new file if there was none.

    Raises:
        OSError: no file can be written there, or not all of it. Nothing has changed then.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.part")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if target.is_file() and not target.is_symlink():
            beside.chmod(target.stat().st_mode & 0o777)
        mode = beside.stat().st_mode & 0o777
        yield beside
        beside.chmod(mode)  # safetensors 0.8.0 puts another file there, with 0600
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Write a text in UTF-8, with its line breaks as they are; as `whole_file` does."""
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="\n")
