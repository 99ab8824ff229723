"""Text that says nothing: sentences of a small grammar, or those of a file."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from hf_hybrid_ssm.evaluation.recall_tasks.words import ADJECTIVES, DID, LINKS, WHAT, WHEN, WHO


def sentences(draw: random.Random) -> Iterator[str]:
    """Without end."""
    while True:
        yield _sentence(draw)


def _sentence(draw: random.Random) -> str:
    who, what = draw.choice(WHO), draw.choice(WHAT)
    if draw.random() < 0.5:
        who = f"{draw.choice(ADJECTIVES)} {who}"
    if draw.random() < 0.7:
        what = f"{draw.choice(ADJECTIVES)} {what}"
    text = f"the {who} {draw.choice(DID)} the {what}"
    if draw.random() < 0.5:
        text = f"{draw.choice(WHEN)}, {text}" if draw.random() < 0.5 else f"{text} {draw.choice(WHEN)}"
    if draw.random() < 0.4:
        text = f"{text}, {draw.choice(LINKS)}"
    return text[0].upper() + text[1:] + "."


def sentences_of_file(path: str | Path, draw: random.Random) -> Iterator[str]:
    """Those of a text file, from a random one on, again from the first after the last.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has fewer than ten sentences.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"text_file={str(path)!r} is not a file.")
    text = " ".join(path.read_text(encoding="utf-8").split())
    parts = [part for part in re.split(r"(?<=[.!?]) ", text) if 20 <= len(part) <= 400]
    if len(parts) < 10:
        raise ValueError(f"text_file={str(path)!r} has {len(parts)} sentences of 20 to 400 characters; 10 are needed.")
    place = draw.randrange(len(parts))
    while True:
        yield parts[place % len(parts)]
        place += 1
