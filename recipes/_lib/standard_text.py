"""English text that ships with Python: the topics of `pydoc` and the docstrings of the standard library."""

import ast
import itertools
import sysconfig
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo"}
SHORTEST = 200  # characters; what is shorter says little


def standard_documents(most: int | None = None) -> tuple[Dataset, Dataset]:
    """Training and held-out documents, columns `text`; the choice depends on a document's name alone.

    Args:
        most: documents to read at the most, None for all (some 430).
    """
    train: list[str] = []
    held_out: list[str] = []
    for name, text in itertools.islice(itertools.chain(_topics(), _docstrings()), most):
        if len(text) >= SHORTEST:
            (held_out if zlib.crc32(name.encode()) % 10 == 0 else train).append(text)
    return Dataset.from_dict({"text": train}), Dataset.from_dict({"text": held_out})


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", textwrap.dedent(topics[name]).strip()


def _docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of each module of the standard library, as one document."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            try:
                module = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):
                continue
            described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            found = (ast.get_docstring(node) for node in ast.walk(module) if isinstance(node, described))
            yield path.relative_to(library).as_posix(), "\n\n".join(text for text in found if text)
