"""Results as they come: one JSON file a part, written after every case, so that a killed run goes on where it was; and
one archive of all, so that they outlive the machine.

A result counts while it is of this device and of these sources (`plan.digest`). One that another takes the place of
stays in the file, under `superseded`: it was measured.
"""

import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import PARTS, digest
from benchmarks.timing import provenance, to_json

KILLED = "killed"
STAMP = "measured"
NAMES = "names"  # of all cases, in the place of a part
Case = dict[str, Any]


class Store:
    """
    Args:
        folder: of the `gpu_<part>.json`, and of the mark that names the case that runs.
        identity: device and size of the run.
        archive: a .tar.gz that holds the files of all parts, written anew after every case; None for none.
        sources: (part, case) → what its sources are known by.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, Any],
        archive: Path | None = None,
        sources: Callable[[str, str], str] = digest,
    ):
        self.folder = folder
        self.identity = identity
        self.archive = archive
        self.sources = sources
        self.running = folder / "gpu_running.json"
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: str) -> Path:
        return self.folder / f"gpu_{part}.json"

    def stamp(self, part: str, case: str) -> dict[str, Any]:
        return self.identity | {"sources": self.sources(part, case)}

    def cases(self, part: str) -> dict[str, Case]:
        """What is on record of a part, of this device and these sources, by case."""
        return {case: found for case, found in self._read(part)["cases"].items() if self._counts(part, case, found)}

    def seconds(self, part: str) -> float:
        """What those took."""
        return sum(found.get("wall_seconds", 0.0) for found in self.cases(part).values())

    def superseded(self, part: str) -> list[Case]:
        """What no longer counts, each with the name of its case."""
        found = self._read(part)
        old = ({"case": case} | each for case, each in found["cases"].items() if not self._counts(part, case, each))
        return [*found["superseded"], *old]

    def _counts(self, part: str, case: str, found: Case) -> bool:
        return found[STAMP] == self.stamp(part, case)

    def _read(self, part: str) -> dict[str, Any]:
        empty: dict[str, Any] = {"cases": {}, "superseded": []}
        return json.loads(self.path(part).read_text(encoding="utf-8")) if self.path(part).is_file() else empty

    def name(self, cases: dict[str, list[str]]) -> None:
        """Put on record which cases each part has."""
        self._write_text(NAMES, json.dumps(cases) + "\n")

    def names(self) -> dict[str, list[str]]:
        """As the last process found them."""
        return json.loads(self.path(NAMES).read_text(encoding="utf-8")) if self.path(NAMES).is_file() else {}

    def begin(self, part: str, case: str) -> None:
        self.running.write_text(json.dumps({"part": part, "case": case}), encoding="utf-8")

    def record(self, part: str, case: str, figures: Case) -> None:
        kept = self._read(part)
        self._replace(kept, case, figures | {STAMP: self.stamp(part, case)})
        self._write(part, kept)
        self.running.unlink(missing_ok=True)
        self.pack()

    def _replace(self, kept: dict[str, Any], case: str, found: Case) -> None:
        """`found` in the place of what there was, which stays among what is superseded."""
        old = kept["cases"].pop(case, None)
        if old is not None and old != found:
            kept["superseded"].append({"case": case} | old)
        kept["cases"][case] = found

    def _write(self, part: str, kept: dict[str, Any]) -> None:
        names = ("cases", "superseded")
        self._write_text(part, to_json(provenance() | {name: kept[name] for name in names}))

    def _write_text(self, part: str, text: str) -> None:
        draft = self.path(part).with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path(part))

    def pack(self, *others: Path) -> None:
        """Write the archive: the files of all parts, and others."""
        if self.archive is None:
            return
        self.archive.parent.mkdir(parents=True, exist_ok=True)
        draft = self.archive.with_suffix(".draft")
        with tarfile.open(draft, "w:gz") as tar:
            for file in (*sorted(self.folder.glob("gpu_*.json")), *others):
                tar.add(file, file.name)
        draft.replace(self.archive)

    def resume(self, archive: Path) -> int:
        """Take over what an archive holds and is not on record here; how many of its cases count."""
        found = {part: text_in(archive, self.path(part).name) for part in PARTS}
        taken = sum(self._take(part, text) for part, text in found.items() if text is not None)
        self.pack()
        return taken

    def _take(self, part: str, text: str) -> int:
        if not self.path(part).is_file():
            self._write_text(part, text)  # with the machine that made it
            return len(self.cases(part))
        archived, here, kept = json.loads(text), self.cases(part), self._read(part)
        for case, found in archived["cases"].items():
            if case not in here:
                self._replace(kept, case, found)
            elif found != here[case]:
                archived["superseded"].append({"case": case} | found)
        kept["superseded"] += [old for old in archived["superseded"] if old not in kept["superseded"]]
        self._write(part, kept)
        return len(self.cases(part)) - len(here)

    def record_killed(self, why: str) -> str | None:
        """The case that ran when its process ended is recorded as failed; its name, or None if none ran."""
        if not self.running.is_file():
            return None
        mark, age = json.loads(self.running.read_text(encoding="utf-8")), time.time() - self.running.stat().st_mtime
        self.record(mark["part"], mark["case"], {"error": why, KILLED: True, "wall_seconds": round(age, 2)})
        return f"{mark['part']}: {mark['case']}"


def text_in(archive: Path, name: str) -> str | None:
    """Of a file in an archive; None where it has no such file."""
    with tarfile.open(archive) as tar:
        member = next((member for member in tar.getmembers() if member.name == name), None)
        file = tar.extractfile(member) if member and member.isfile() else None
        return None if file is None else file.read().decode()
