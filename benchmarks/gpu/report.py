"""One page from the results of all parts: what failed, and every figure."""

import platform
import re
from collections.abc import Iterator
from importlib.metadata import version

from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.store import STAMP, Store
from benchmarks.table_text import markdown_table
from benchmarks.timing import provenance

ABOUT = ("src/hf_hybrid_ssm/ops", "src/hf_hybrid_ssm/layers", "src/hf_hybrid_ssm/models", "benchmarks/gpu")
Cases = dict[str, dict]


def asked_of(store: Store, chosen: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The cases that were asked for, by name: those that failed, and those that have not run."""
    every = {f"{part}: {case}" for part, cases in store.names().items() for case in cases}
    found = {f"{part}: {case}" for part in PARTS for case in store.cases(part)}
    waiting = [name for name in every - found if chosen.search(name)]
    if not waiting and not any(map(chosen.search, found)):
        raise ValueError(f"--cases {chosen.pattern!r} is found in no case")
    return [name for name in store.failures() if chosen.search(name)], waiting


def page(store: Store, settings: Settings) -> str:
    text = "\n".join(["# On a GPU", "", made(store, settings), "", overview(store), ""])
    for part in PARTS:
        if cases := store.cases(part):
            text += f"\n## {part.capitalize()}: {PARTS[part].about}\n\n{table(cases)}{failed(cases)}"
    return text


def made(store: Store, settings: Settings) -> str:
    commit = str(provenance()["commit"])
    changed = " and uncommitted changes" if commit.endswith("+") else ""
    command = "bash tools/card.sh" + (" --device cpu --rehearse" if settings.rehearse else "")
    versions = f"python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"
    about = ", ".join(f"`{path}`" for path in ABOUT)
    where = "a CPU, with tiny sizes: nothing here is a measurement" if settings.rehearse else store.identity["device"]
    return (
        f"Made by `{command}` from commit `{commit.rstrip('+')}`{changed} with {versions}, on {where}. About: {about}."
    )


def failures(cases: Cases) -> Cases:
    return {name: found for name, found in cases.items() if "error" in found}


def failed(cases: Cases) -> str:
    return "".join(f"- {name}: `{found['error']}`\n" for name, found in failures(cases).items())


def overview(store: Store) -> str:
    names = store.names()
    rows = []
    for part in PARTS:
        cases = store.cases(part)
        waiting = len(set(names.get(part, [])) - set(cases))
        seconds, compiled = (
            sum(each.get(key, 0) for each in cases.values()) for key in ("wall_seconds", "programs_compiled")
        )
        rows.append([part, len(cases), len(failures(cases)), waiting, f"{seconds:.0f}", compiled])
    return markdown_table(["part", "cases", "failed", "to be run", "seconds", "programs compiled"], rows)


def table(cases: Cases) -> str:
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
