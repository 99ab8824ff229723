"""Results as they come: one JSON file, written after every case, so that a killed run goes on where it was.

A result counts while it is of this device and its part of these sources (`plan.digest`); else its case is run again.
"""

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import PARTS, digest
from benchmarks.timing import provenance, to_json

NAME = "gpu.json"
KILLED = "killed"
STAMP = "measured"
Case = dict[str, Any]


class Store:
    """
    Args:
        folder: of `NAME`, and of the mark that names the case that runs.
        identity: device and size of the run.
        copy: a folder that gets a copy of the results after every case; None for none.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], copy: Path | None = None):
        self.folder, self.identity, self.copy = folder, identity, copy
        self.running = folder / "gpu_running.json"
        for place in self._places:
            place.mkdir(parents=True, exist_ok=True)

    @property
    def _places(self) -> list[Path]:
        return [self.folder, *([self.copy] if self.copy else [])]

    def cases(self, part: str) -> dict[str, Case]:
        """What is on record of a part, of this device and these sources, by case."""
        return self._counting(part, self._read(self.folder / NAME)["parts"].get(part, {}))

    def _counting(self, part: str, found: dict[str, Case]) -> dict[str, Case]:
        return {case: each for case, each in found.items() if each[STAMP] == self._stamp(part)}

    def _stamp(self, part: str) -> dict[str, Any]:
        return self.identity | {"sources": digest(part)}

    @staticmethod
    def _read(file: Path) -> dict[str, Any]:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"names": {}, "parts": {}}

    def name(self, cases: dict[str, list[str]]) -> None:
        """Put on record which cases each part has."""
        self._write(self._read(self.folder / NAME) | {"names": cases})

    def names(self) -> dict[str, list[str]]:
        """As the last process found them."""
        return self._read(self.folder / NAME)["names"]

    def begin(self, part: str, case: str) -> None:
        self.running.write_text(json.dumps({"part": part, "case": case}), encoding="utf-8")

    def record(self, part: str, case: str, figures: Case) -> None:
        kept = self._read(self.folder / NAME)
        kept["parts"].setdefault(part, {})[case] = figures | {STAMP: self._stamp(part)}
        self._write(kept)
        self.running.unlink(missing_ok=True)

    def _write(self, kept: dict[str, Any]) -> None:
        self.write(NAME, to_json(provenance() | {name: kept[name] for name in ("names", "parts")}))

    def write(self, name: str, text: str) -> None:
        """A file beside the results, whole or not at all."""
        for place in self._places:
            draft = place / f"{name}.draft"
            draft.write_text(text, encoding="utf-8")
            draft.replace(place / name)

    def resume(self, file: Path) -> int:
        """Take over what another file holds and is not on record here; how many cases these are."""
        kept, taken = self._read(self.folder / NAME), 0
        for part, found in self._read(file)["parts"].items():
            here = self.cases(part)
            new = {case: each for case, each in self._counting(part, found).items() if case not in here}
            kept["parts"].setdefault(part, {}).update(new)
            taken += len(new)
        self._write(kept)
        return taken

    def record_killed(self, why: str) -> str | None:
        """The case that ran when its process ended is recorded as failed; its name, or None if none ran."""
        if not self.running.is_file():
            return None
        mark, age = json.loads(self.running.read_text(encoding="utf-8")), time.time() - self.running.stat().st_mtime
        self.record(mark["part"], mark["case"], {"error": why, KILLED: True, "wall_seconds": round(age, 2)})
        return f"{mark['part']}: {mark['case']}"

    def failures(self) -> dict[str, str]:
        """Case → error."""
        found = {f"{part}: {case}": each for part in PARTS for case, each in self.cases(part).items()}
        return {name: each["error"] for name, each in found.items() if "error" in each}
