"""Results as they come: one JSON file a part, written after every case, so that a killed run goes on where it was."""

import json
from pathlib import Path
from typing import Any

from benchmarks.timing import provenance, to_json

KILLED = "killed"


class Store:
    """
    Args:
        folder: of the `gpu_<part>.json`, and of the mark that names the case that runs.
        identity: device and size of the run; results of another identity or commit are begun anew.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        self.identity = identity
        self.running = folder / "gpu_running.json"
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, part: str) -> Path:
        return self.folder / f"gpu_{part}.json"

    def cases(self, part: str) -> dict[str, dict]:
        """What is recorded of a part, by case."""
        if not self.path(part).is_file():
            return {}
        found = json.loads(self.path(part).read_text(encoding="utf-8"))
        same = found.get("identity") == self.identity and found.get("commit") == provenance()["commit"]
        return found["cases"] if same else {}

    def begin(self, part: str, case: str) -> None:
        self.running.write_text(json.dumps({"part": part, "case": case}), encoding="utf-8")

    def record(self, part: str, case: str, figures: dict[str, Any]) -> None:
        cases = self.cases(part) | {case: figures}
        text = to_json(provenance() | {"identity": self.identity, "cases": cases})
        draft = self.path(part).with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path(part))
        self.running.unlink(missing_ok=True)

    def record_killed(self, why: str) -> str | None:
        """The case that ran when its process ended is recorded as failed; its name, or None if none ran."""
        if not self.running.is_file():
            return None
        mark = json.loads(self.running.read_text(encoding="utf-8"))
        self.record(mark["part"], mark["case"], {"error": why, KILLED: True})
        return f"{mark['part']}: {mark['case']}"
