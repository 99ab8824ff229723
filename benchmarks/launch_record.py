"""What compilers made of every launch, for cards that are not here: the record, and the page about it.

reports/kernel_limits.json has a line for what is launched (`WHAT`), with the digest of its op's kernels when it was
compiled, their names, and by version of Triton and card the numbers of each program that the launch asked for
(`PROGRAM`; kernels by number), and why it was not launched in the end, if it was not.
"""

import ast
import fcntl
import functools
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "reports" / "kernel_limits.json"
OPS = ROOT / "src" / "hf_hybrid_ssm" / "ops"
WHERE = ("triton", "sm")
WHAT = ("op", "class", "dtype", "aligned")
NAME = (*WHERE, *WHAT)
LAUNCHED = "launched"
PROGRAM = ("kernel", "registers", "shared", "instructions", "spills in inner loops")
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a program may share, by compute capability."""
FOLDERS = {"longhorn_step": "longhorn_scan", "causal_conv_step": "causal_conv", "lti_scan": "linear_scan"}
FOLDERS |= {"diagonal_scan": "linear_scan"}
KERNELS = ("kernel", "triton.jit")  # decorators


@functools.cache
def source_of(op: str) -> str:
    """A digest of what decides an op's programs: its kernels, what they call, and tables of sizes; no comments, and
    nothing of what only calls them."""
    files = sorted((OPS / FOLDERS.get(op, op)).glob("triton*.py"))
    own = [file for file in files if op == "longhorn_step" or not file.stem.startswith("triton_step")]
    own = [file for file in own if op != "longhorn_step" or file.stem.startswith("triton_step")]
    parts = [part for file in own for part in _deciding(file)]
    others = [file for file in files if file not in own] + [OPS / "core" / "triton_helpers.py"]
    found = [part for file in others for part in _deciding(file) if isinstance(part, ast.FunctionDef)]
    helpers = {part.name: part for part in found}
    called: set[str] = set()
    for part in parts:  # it grows by the helpers that those before it call
        named = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        new = sorted((named & set(helpers)) - called)
        called.update(new)
        parts += [helpers[name] for name in new]
    return hashlib.sha256("\n".join(map(ast.unparse, parts)).encode()).hexdigest()[:12]


def _deciding(file: Path) -> Iterator[ast.FunctionDef | ast.Assign]:
    for part in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(part, ast.FunctionDef) and any(ast.unparse(by) in KERNELS for by in part.decorator_list):
            if ast.get_docstring(part) is not None:
                part.body = part.body[1:]
            yield part
        elif isinstance(part, ast.Assign) and all(ast.unparse(name).isupper() for name in part.targets):
            yield part


def read() -> dict[tuple, dict]:
    """The launches on record, by name."""
    found = {}
    for line in json.loads((FILE.read_text(encoding="utf-8") if FILE.is_file() else "") or "[]"):
        for version, by_card in line["launches"].items():
            for sm, (numbers, *refusal) in by_card.items():
                name = {"triton": version, "sm": int(sm)} | {part: line[part] for part in WHAT}
                asked = [[line["kernels"][kernel], *rest] for kernel, *rest in numbers]
                ends = {"source": line["source"], "launch": refusal[0] if refusal else LAUNCHED, "programs": asked}
                found[tuple(name[part] for part in NAME)] = name | ends
    return found


def programs(launches: Iterable[dict]) -> Iterator[dict[str, Any]]:
    """Each program of each launch, with the launch's name, and whether it fits the card."""
    for launch in launches:
        for program in launch["programs"]:
            found = {part: launch[part] for part in NAME} | dict(zip(PROGRAM, program))
            yield found | {"fits": found["shared"] <= SHARED[found["sm"]]}


def add(launch: dict) -> None:
    """In the place of what was on record of it, and of other sources; several processes may add."""
    with FILE.open("a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launches = read() | {tuple(launch[part] for part in NAME): launch}
        by_what: dict[tuple, list[dict]] = defaultdict(list)
        for name in sorted(launches, key=_order):
            by_what[name[len(WHERE) :]].append(launches[name])
        what = tuple(launch[part] for part in WHAT)
        by_what[what] = [each for each in by_what[what] if each["source"] == launch["source"]]
        lines = ",\n".join(_line(what, by_what[what]) for what in sorted(by_what, key=str))
        FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _line(what: tuple, launches: list[dict]) -> str:
    kernels = sorted({program[0] for launch in launches for program in launch["programs"]})
    by_version: dict[str, dict[str, list]] = defaultdict(dict)
    for launch in launches:
        numbers = [[kernels.index(kernel), *rest] for kernel, *rest in launch["programs"]]
        refusal = [] if launch["launch"] == LAUNCHED else [launch["launch"]]
        by_version[launch["triton"]][str(launch["sm"])] = [numbers, *refusal]
    line = dict(zip(WHAT, what)) | {"source": launches[0]["source"], "kernels": kernels, "launches": by_version}
    return json.dumps(line, separators=(",", ":"))


def _order(name: tuple) -> tuple:
    version, sm, *rest = name
    return [int(part) for part in version.split(".")], sm, *map(str, rest)


ABOUT = """
The package launches its Triton kernels with all options on, and what each launch asks for is compiled for cards that
are not here: **nothing on this page was measured on one, and no kernel has ever run on a GPU.** Classes: 16, 32, 64,
128 and 256 states (scans and their steps), 2 and 4 taps (short convolution), memories of order 50 and 220; bfloat16
and float32; rows that begin at multiples of 16 bytes, and rows that do not. A launch that asks for more than a program
may share (166,912 bytes on sm_80, 232,448 on sm_90 and sm_100) is followed by one with smaller sizes.
"""


def write_page() -> None:
    from tests import reporting

    launches = read()
    every = list(programs(launches.values()))
    sources = sorted(file.relative_to(ROOT).as_posix() for file in OPS.rglob("triton*.py"))
    made = reporting.made_by("python -m tools.triton_versions --limits", (*sources, "benchmarks/kernel_limits.py"))
    counted = Counter((name[0], name[1]) for name in launches)
    fresh = Counter(name[:2] for name, launch in launches.items() if launch["source"] == source_of(name[2]))
    refused = Counter((p["triton"], p["sm"]) for p in every if not p["fits"])
    head = ["Triton", "card", "launches", "of today's kernels", "programs", "refused", "spilling in inner loops"]
    rows = []
    for version, sm in counted:
        here = [p for p in every if (p["triton"], p["sm"]) == (version, sm)]
        spilling = sum(p["fits"] and p["spills in inner loops"] > 0 for p in here)
        key = (version, sm)
        rows.append([version, f"sm_{sm}", counted[key], fresh[key], len(here), refused[key], spilling])
    most: dict[tuple, dict[str, int]] = defaultdict(Counter)
    for p in every:
        if p["fits"]:
            found = most[p["op"], p["kernel"], p["class"], p["dtype"]]
            for name in ("registers", "shared", "instructions", "spills in inner loops"):
                found[name] = max(found[name], p[name])
    columns = ("registers", "shared", "instructions", "spills in inner loops")
    worst = ([*name, *(found[column] for column in columns)] for name, found in sorted(most.items()))
    reporting.write_page(
        "kernel_limits.md",
        "Triton kernels: shared memory and spills of every launch",
        made,
        ABOUT.strip(),
        reporting.table(head, rows),
        "## The most of any version and card, by kernel",
        "Bytes shared are those of what was launched in the end.",
        reporting.table(["op", "kernel", "class", "dtype", *columns], worst),
    )
