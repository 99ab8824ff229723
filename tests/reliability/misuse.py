"""Every known way to misuse the public API, and the answer it gets.

    python -m tests.reliability.misuse

Writes docs/reliability/misuse.md. Exits with 1 if a message does not say what was wrong, or a mistake passes
silently that is not listed as doing so.
"""

import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from transformers.utils import logging

from tests.reliability.misuses import Misuse, caches, configurations, files, generation, inputs, operations
from tests.reliability.misuses.silent import SILENT
from tests.reliability.reporting import table, write_page

MISUSES: list[Misuse] = [
    *configurations.MISUSES,
    *inputs.MISUSES,
    *caches.MISUSES,
    *generation.MISUSES,
    *files.MISUSES,
    *operations.MISUSES,
]


def answer(misuse: Misuse, folder: Path) -> Exception | None:
    """What the misuse raises, or None if it goes through."""
    try:
        misuse.provoke(folder)
    except Exception as error:
        return error
    return None


def fault(misuse: Misuse, error: Exception | None) -> str | None:
    """What is wrong with an answer; None if it is right."""
    if error is None:
        return "it passes silently"
    if not isinstance(error, misuse.expected):
        return f"{type(error).__name__} instead of {' or '.join(kind.__name__ for kind in misuse.expected)}: {error}"
    if not re.search(misuse.words, str(error), re.DOTALL):
        return f"the message lacks {misuse.words!r}: {error}"
    return None


def shown(error: Exception | None, folder: Path) -> str:
    """The message on one line, without the folder it happened in."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # some messages are coloured
    text = " ".join(plain.replace(str(folder), "FOLDER").split())
    return text if len(text) <= 300 else text[:297] + "..."


def main() -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows, faults = [], []
    for misuse in MISUSES:
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = answer(misuse, Path(place))
            if found := fault(misuse, error):
                faults.append(f"{misuse}: {found}")
            rows.append([misuse.part, misuse.done, type(error).__name__, shown(error, Path(place))])
    for done, provoke, _ in SILENT:
        with tempfile.TemporaryDirectory() as place:
            try:
                provoke(Path(place))
            except Exception as error:
                faults.append(f"silent, {done}: raises {type(error).__name__}: {error}")
    print("\n".join(faults) or "every misuse is answered")
    parts = Counter(misuse.part for misuse in MISUSES)
    write_page(
        "misuse",
        "What the API answers to mistakes",
        f"`python -m tests.reliability.misuse` makes {len(MISUSES)} kinds of mistakes. Each must raise an exception "
        "of an expected type, whose message names the argument and its value or what would be right; "
        f"{len(faults)} do not. The tests make them too.",
        table(["part of the API", "mistakes"], parts.items()),
        table(["part", "mistake", "exception", "message"], rows),
        "## What raises nothing",
        "As in all of transformers. The command and the tests make these mistakes too, and hold what the table says.",
        table(["mistake", "what happens"], ([done, happens] for done, _, happens in SILENT)),
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
