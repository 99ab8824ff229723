"""Results as they come: one JSON file a part, written after every case, so that a killed run goes on where it was; and
one archive of all, so that they outlive the machine.
"""

import hashlib
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.timing import provenance, to_json

KILLED = "killed"


class Store:
    """
    Args:
        folder: of the `gpu_<part>.json`, and of the mark that names the case that runs.
        identity: device, size and sources of the run; results of another identity are begun anew.
        archive: a .tar.gz that holds the files of all parts, written anew after every case; None for none.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], archive: Path | None = None):
        self.folder = folder
        self.identity = identity
        self.archive = archive
        self.running = folder / "gpu_running.json"
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: str) -> Path:
        return self.folder / f"gpu_{part}.json"

    def cases(self, part: str) -> dict[str, dict]:
        """What is recorded of a part, by case."""
        if not self.path(part).is_file():
            return {}
        return self._of_this_run(self.path(part).read_text(encoding="utf-8"))

    def _of_this_run(self, text: str) -> dict[str, dict]:
        found = json.loads(text)
        return found["cases"] if found.get("identity") == self.identity else {}

    def begin(self, part: str, case: str) -> None:
        self.running.write_text(json.dumps({"part": part, "case": case}), encoding="utf-8")

    def record(self, part: str, case: str, figures: dict[str, Any]) -> None:
        self._write(part, self.cases(part) | {case: figures})
        self.running.unlink(missing_ok=True)
        self.pack()

    def _write(self, part: str, cases: dict[str, dict], text: str | None = None) -> None:
        """A part's file, or `text`, which was one on the machine that made it."""
        text = text or to_json(provenance() | {"identity": self.identity, "cases": cases})
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
        """Take over what an archive holds of this identity and is not recorded here; how many cases that were."""
        taken = 0
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                name = re.fullmatch(r"gpu_(\w+)\.json", member.name)
                file = tar.extractfile(member) if name and member.isfile() else None
                if file is None or name is None or member.name == self.running.name:
                    continue
                here, text = self.cases(name[1]), file.read().decode()
                archived = self._of_this_run(text)
                if more := {case: found for case, found in archived.items() if case not in here}:
                    self._write(name[1], here | more, text=None if here else text)
                    taken += len(more)
        self.pack()
        return taken

    def record_killed(self, why: str) -> str | None:
        """The case that ran when its process ended is recorded as failed; its name, or None if none ran."""
        if not self.running.is_file():
            return None
        mark = json.loads(self.running.read_text(encoding="utf-8"))
        self.record(mark["part"], mark["case"], {"error": why, KILLED: True})
        return f"{mark['part']}: {mark['case']}"


def digest(root: Path) -> str:
    """Of the sources that results depend on: the machine with the card may have no repository to name a commit."""
    found = hashlib.sha256()
    for folder in ("src/hf_hybrid_ssm", "benchmarks/gpu", "benchmarks/timing"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".py", ".c"):
                found.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:16]
