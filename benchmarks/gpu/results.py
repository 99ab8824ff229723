"""Results as they come, in one JSON file that is whole after every case, and as a page: what failed, every figure.

A result counts while it is of this device and its part of these sources (`plan.digest`); else its case is run again.
"""

import json
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import PARTS, digest
from benchmarks.gpu.settings import Settings
from benchmarks.table_text import markdown_table
from benchmarks.timing import provenance, to_json
from hf_hybrid_ssm.hub.writing import write_whole

NAME = "gpu.json"
STAMP = "measured"
ABOUT = ("src/hf_hybrid_ssm/ops", "src/hf_hybrid_ssm/layers", "src/hf_hybrid_ssm/models", "benchmarks/gpu")
Case = dict[str, Any]


class Results:
    """
    Args:
        folders: each gets `NAME` after every case.
        earlier: folders that may hold `NAME` of an earlier command.

    Attributes:
        names: of all cases, "PART: CASE", as the last process found them.
        cases: by such a name, what is on record and counts.
    """

    def __init__(self, settings: Settings, folders: Sequence[Path], earlier: Sequence[Path]):
        self.settings, self.folders, self.earlier = settings, folders, earlier
        self.device = ""
        self.names: list[str] = []
        self.cases: dict[str, Case] = {}

    def begin(self, device: str, names: list[str]) -> None:
        """Of this device and these cases; what earlier commands have left of them counts."""
        if self.device:
            return
        self.device, self.names = device, names
        for file in (folder / NAME for folder in self.earlier):
            found = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.is_file() else {}
            self.cases |= {name: case for name, case in found.items() if case[STAMP] == self._stamp(name)}
        self._save()

    def _stamp(self, name: str) -> dict[str, Any]:
        sources = digest(name.partition(":")[0])
        return {"device": self.device, "rehearsal": self.settings.rehearse, "sources": sources}

    def record(self, name: str, figures: Case) -> None:
        self.cases[name] = figures | {STAMP: self._stamp(name)}
        self._save()

    def _save(self) -> None:
        self.write(NAME, to_json(provenance() | {"cases": self.cases}))

    def write(self, name: str, text: str) -> None:
        """A file beside the results, whole or not at all."""
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)

    def of_part(self, part: str) -> dict[str, Case]:
        """By the case's own name."""
        return {name.partition(": ")[2]: case for name, case in self.cases.items() if name.startswith(f"{part}: ")}

    def page(self) -> str:
        text = "\n".join(["# On a GPU", "", self.made(), "", self.overview(), ""])
        for part, about in PARTS.items():
            if cases := self.of_part(part):
                failed = "".join(f"- {name}: `{found['error']}`\n" for name, found in failures(cases).items())
                text += f"\n## {part.capitalize()}: {about.about}\n\n{table(cases)}{failed}"
        return text

    def made(self) -> str:
        commit, is_tiny = str(provenance()["commit"]), self.settings.rehearse
        changed = " and uncommitted changes" if commit.endswith("+") else ""
        command = "bash tools/card.sh" + (" --device cpu --rehearse" if is_tiny else "")
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        where = "a CPU, with tiny sizes: nothing here is a measurement" if is_tiny else self.device
        return (
            f"Made by `{command}` from commit `{commit.rstrip('+')}`{changed} with python "
            f"{platform.python_version()}, {versions}, on {where}. About: "
            f"{', '.join(f'`{path}`' for path in ABOUT)}."
        )

    def overview(self) -> str:
        rows = []
        for part in PARTS:
            cases = self.of_part(part)
            waiting = sum(name.startswith(f"{part}: ") and name not in self.cases for name in self.names)
            seconds, compiled = (
                sum(each.get(key, 0) for each in cases.values()) for key in ("wall_seconds", "programs_compiled")
            )
            rows.append([part, len(cases), len(failures(cases)), waiting, f"{seconds:.0f}", compiled])
        return markdown_table(["part", "cases", "failed", "to be run", "seconds", "programs compiled"], rows)


def failures(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: found for name, found in cases.items() if "error" in found}


def table(cases: dict[str, Case]) -> str:
    """Every number and word that a case has, a column each."""
    rows = {name: dict(flat(found)) for name, found in cases.items() if "error" not in found}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return markdown_table(["case", *columns], [[name, *map(row.get, columns)] for name, row in rows.items()])


def flat(found: dict, of: str = "") -> Iterator[tuple[str, object]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from flat(value, f"{of}{name} ") if name != STAMP else ()
        elif isinstance(value, str | int | float) and name != "wall_seconds":
            yield f"{of}{name}".replace("_", " "), f"{value:,.6g}" if isinstance(value, float) else value
