"""What a command or a recipe prints at its end: one that can be typed next, as it stands there."""

import os
import shlex
from typing import Any

BEGINNING = "Once upon a time"


def next_command(*words: str | os.PathLike) -> str:
    """The lines to print for `hf-hybrid-ssm WORDS`, quoted for a shell."""
    return f"Next:\n  {shlex.join(['hf-hybrid-ssm', *map(str, words)])}"


def talking(folder: str | os.PathLike, tokenizer: Any, teacher: str | None = None) -> list[str]:
    """The words that let one see what a folder's model says: a chat where its tokenizer has a template.

    Args:
        teacher: of a delta, as the user gave it.
    """
    where = ["--teacher", teacher] if teacher is not None else []
    if tokenizer.chat_template is not None:
        return ["chat", str(folder), *where]
    return ["generate", str(folder), BEGINNING, *where]
