"""Cells of long_context.py as they come: one JSON file each, so that a run that was stopped goes on with the rest."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import COMMIT, to_json


class Cell(NamedTuple):
    """One measurement: `kind` is "write" or "read"."""

    kind: str
    model: str
    form: str
    length: int

    def __str__(self) -> str:
        return f"{self.model}, {self.form}, {self.kind} at {self.length:,} tokens"


class Store:
    """
    Args:
        folder: of the cells, and of the models that were made for them.
        settings: what cells depend on. Those of other settings are kept for nobody: the folder is refused.
        overwrite: begin anew instead.

    Raises:
        FileExistsError: the folder has cells of other settings, or is no such folder.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], overwrite: bool):
        self.folder, known = folder, folder / "settings.json"
        if overwrite and known.is_file():
            for part in ("cells", "models", "logs"):
                shutil.rmtree(folder / part, ignore_errors=True)
            known.unlink()
        if known.is_file():
            found = json.loads(known.read_text(encoding="utf-8"))
            if other := sorted(name for name in settings.keys() | found if settings.get(name) != found.get(name)):
                raise FileExistsError(
                    f"{folder} has measurements of other settings: {other[0]}={found.get(other[0])!r}, now "
                    f"{settings.get(other[0])!r}. Name another folder, or give --overwrite."
                )
        elif folder.exists() and any(folder.iterdir()):
            raise FileExistsError(f"{folder} holds something else. Name another folder.")
        for part in ("cells", "models", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._write(known, settings)

    def path(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.kind}-{cell.model}-{cell.form}-{cell.length}.json"

    def has(self, cell: Cell) -> bool:
        return self.path(cell).is_file()

    def record(self, cell: Cell, found: dict[str, Any]) -> None:
        self._write(self.path(cell), {"cell": cell._asdict(), "commit": COMMIT} | found)

    def cells(self) -> dict[Cell, dict[str, Any]]:
        """All that is recorded, whoever asked for it."""
        found = {}
        for path in sorted((self.folder / "cells").glob("*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            found[Cell(**content.pop("cell"))] = content
        return found

    def note(self, name: str, content: dict[str, Any]) -> None:
        """What is true of all cells of a program, such as its version."""
        self._write(self.folder / f"{name}.json", content)

    def noted(self, name: str) -> dict[str, Any] | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @staticmethod
    def _write(path: Path, content: dict[str, Any]) -> None:
        draft = path.with_suffix(".draft")
        draft.write_text(to_json(content), encoding="utf-8")
        draft.replace(path)
