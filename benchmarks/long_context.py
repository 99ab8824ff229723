"""What does a long text cost on a CPU: reading a prompt, writing a token, memory; by length, of a transformer, of its
students, and of llama.cpp with the same weights?

    python benchmarks/long_context.py TEACHER.gguf --llama-python VENV/bin/python

TEACHER is a GGUF file or a folder; without it, weights are random, of SmolLM2-135M's shape, and no page shows them.
Students are made by `upcycle` and not trained. A token is written after a cache that was filled, not read. llama.cpp
runs in the Python that --llama-python or $HF_HYBRID_SSM_LLAMA_PYTHON names (`pip install llama-cpp-python` there),
with the GGUF file as it is and brought to 8 and 16 bits. Every measurement is written to --output as soon as it is
done: the same command goes on where it was stopped. Models are made in runs/long_context.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from benchmarks.long_context_models import STUDENTS, TEACHER, make_folders
from benchmarks.long_context_torch import FORMS, KINDS
from benchmarks.timing import COMMIT, RESULTS, provenance, to_json

ROOT = Path(__file__).parents[1]
WORK = ROOT / "runs" / "long_context"
LENGTHS = [512, 4096, 8192, 16384, 32768, 65536]
LLAMA_CPP, AS_GIVEN = "llama.cpp", "as given"
LLAMA_CPP_FORMS = (AS_GIVEN, "Q8_0", "F16")
MODELS = (TEACHER, *STUDENTS, LLAMA_CPP)
LLAMA_PYTHON = "HF_HYBRID_SSM_LLAMA_PYTHON"
Cell = tuple[str, str, str, int]
"""Kind ("write" or "read"), model, form and length."""
SETTINGS = ("threads", "steps", "rounds", "seconds")  # that a measurement depends on


def parser_of_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", nargs="?", help="a GGUF file or a folder; random weights by default")
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"some of: {', '.join(MODELS)}")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM",
                        help=f"of weights in torch, some of: {', '.join(FORMS)}")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what to time")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="tokens that a round writes (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="medians are shown (default: 5)")
    parser.add_argument("--seconds", type=float, default=60, help="after which no further round of a cell begins")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further cell begins (default: 60)")
    parser.add_argument("--llama-python", default=os.environ.get(LLAMA_PYTHON), help=f"default: ${LLAMA_PYTHON}")
    parser.add_argument(
        "--output", type=Path, help="default: benchmarks/results/long_context.json, if TEACHER is given"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin the output anew")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser


def checked(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parsed; `models` are those that can be measured."""
    given = parser.parse_args(arguments)
    if given.device != "cpu":
        parser.error("--device cuda: this benchmark is about CPUs.")
    for name in (*SETTINGS, "minutes"):
        if not getattr(given, name) > 0:
            parser.error(f"--{name} must be above 0, got {getattr(given, name)}.")
    if wrong := [length for length in given.lengths if length < 1]:
        parser.error(f"--lengths must be 1 or more, got {wrong[0]}.")
    if given.teacher is not None and not Path(given.teacher).exists():
        parser.error(f"{given.teacher}: there is no such file or folder.")
    lacking = without_llama_cpp(given.teacher, given.llama_python)
    if lacking and LLAMA_CPP in (given.models or ()):
        parser.error(f"--models llama.cpp: {lacking}")
    given.skipped = {LLAMA_CPP: lacking} if lacking and given.models is None else {}
    given.models = [name for name in given.models or MODELS if name not in given.skipped]
    given.lengths = sorted(set(given.lengths))
    given.work = WORK / identity(given.teacher)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.output is None:  # no page shows random weights
        given.output = given.work / "figures.json" if given.teacher is None else RESULTS / "long_context.json"
    return given


def without_llama_cpp(teacher: str | None, python: str | None) -> str | None:
    """Why llama.cpp cannot be measured, or None."""
    if teacher is None or Path(teacher).suffix != ".gguf":
        return f"it needs a GGUF file, got {teacher}."
    if not python:
        return f"--llama-python or ${LLAMA_PYTHON} must name a Python with llama-cpp-python."
    command = [python, "-c", "import llama_cpp"]
    try:
        found = subprocess.run(command, env=environment_of_llama_cpp(), capture_output=True, text=True, check=False)
    except OSError as error:
        return f"--llama-python {python}: {error.strerror}."
    return None if found.returncode == 0 else f"--llama-python {python}: {last_line(found.stderr)}"


def environment_of_llama_cpp() -> dict[str, str]:
    """Its Python must not see the packages of this one."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


def identity(teacher: str | None) -> str:
    """Of the weights, by their content."""
    if teacher is None:
        return "random"
    path = Path(teacher)
    files = [path] if path.is_file() else [*sorted(path.glob("*.safetensors")), path / "config.json"]
    found = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()[:16]


class Measurement:
    """Measures what the figures lack, each model and form in a process of its own, and writes them after every cell.

    Attributes:
        figures: what the table and the picture are made from.
        failed: one line for each process that ended badly.
        skipped: what cannot be measured here, and why.
    """

    def __init__(self, given: argparse.Namespace, figures: dict[str, Any]):
        self.given, self.figures = given, figures
        self.failed: list[str] = []
        self.skipped: dict[str, str] = figures["skipped"]
        self.until = time.monotonic() + 60 * given.minutes
        self.folders: dict[tuple[str, str], Path] = {}
        self.files: dict[str, Path] = {}

    def run(self) -> None:
        """First all that is written, then what is read, which takes longer."""
        lacking = self.left()
        in_torch = [TEACHER, *(name for name in STUDENTS if any(cell[1] == name for cell in lacking))]
        dtypes = sorted({FORMS[form][0] for form in self.given.forms})
        self.folders = make_folders(self.given.teacher, in_torch, dtypes, self.given.work / "models")
        self.figures["teacher"] = shape_of(self.folders[TEACHER, "float32"], self.given.teacher)
        if any(cell[1] == LLAMA_CPP for cell in lacking):
            self.files = self._converted()
        for (kind, model, form), cells in groupby(lacking, key=lambda cell: cell[:3]):
            if model == LLAMA_CPP and form not in self.files:  # skipped
                continue
            if time.monotonic() < self.until:
                self._measure(kind, model, form, [length for *_, length in cells])

    def left(self) -> list[Cell]:
        """What has not been measured and could be."""
        found = []
        for kind, model in product(self.given.kinds, self.given.models):
            for form, length in product(forms_of(model, self.given.forms), self.given.lengths):
                if model in self.skipped or f"{model}, {form}" in self.skipped:
                    continue
                if str(length) not in self.figures["cells"].get(model, {}).get(form, {}).get(kind, {}):
                    found.append((kind, model, form, length))
        return found

    def _record(self, kind: str, model: str, form: str, found: dict[str, Any]) -> None:
        cells, length = self.figures["cells"], str(found.pop("length"))
        by_length = cells.setdefault(model, {}).setdefault(form, {}).setdefault(kind, {})
        by_length[length] = {"commit": COMMIT} | found
        by_length |= {each: by_length.pop(each) for each in sorted(by_length, key=int)}
        self.write()

    def write(self) -> None:
        """The figures, with models and forms in their order."""
        cells = self.figures["cells"]
        self.figures["cells"] = {
            model: {form: cells[model][form] for form in forms_of(model) if form in cells[model]}
            for model in MODELS
            if model in cells
        }
        every = (
            c
            for forms in cells.values()
            for kinds in forms.values()
            for found in kinds.values()
            for c in found.values()
        )
        self.figures["commit"] = ", ".join(sorted({cell["commit"] for cell in every}))
        draft = self.given.output.with_suffix(".draft")
        draft.write_text(to_json(self.figures), encoding="utf-8")
        draft.replace(self.given.output)

    def _measure(self, kind: str, model: str, form: str, lengths: list[int]) -> None:
        request = {"kind": kind, "form": form, "lengths": lengths}
        request |= {name: getattr(self.given, name) for name in SETTINGS}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            process = self._start(model, request, errors)
            for line in process.stdout or ():
                if not line.startswith('{"length"'):
                    continue
                found = json.loads(line)
                print(f"{named(kind, model, form, found['length'])}: {figure_of(found)}", flush=True)
                self._record(kind, model, form, found)
                if time.monotonic() > self.until:
                    process.kill()
                    process.wait()
                    return
            if code := process.wait():
                errors.seek(0)
                self.failed.append(f"{model}, {form}, {kind}: ended with {code}: {last_line(errors.read())}")

    def _start(self, model: str, request: dict[str, Any], errors: Any = None) -> subprocess.Popen:
        if model == LLAMA_CPP:
            file = self.files.get(request.get("form", ""), self.given.teacher)
            request = {"file": str(Path(file).resolve())} | request
            program, python, env = "long_context_llama_cpp", self.given.llama_python, environment_of_llama_cpp()
        else:
            folder = self.folders[model, FORMS[request["form"]][0]]
            request = {"folder": str(folder.resolve())} | request
            program, python, env = "long_context_torch", sys.executable, dict(os.environ)
        env |= {"OMP_NUM_THREADS": str(self.given.threads)}
        command = [python, "-m", f"benchmarks.{program}", json.dumps(request)]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)

    def _converted(self) -> dict[str, Path]:
        """The file as it is and in the other forms; what cannot be made is skipped with a line."""
        said, _ = self._start(LLAMA_CPP, {"kind": "about"}).communicate()
        self.figures["llama_cpp"] = json.loads(last_line(said))
        files = {AS_GIVEN: Path(self.given.teacher)}
        for form in LLAMA_CPP_FORMS[1:]:
            place = (self.given.work / "models" / f"{form}.gguf").resolve()
            if not place.is_file():
                request = {"kind": "convert", "to": str(place), "form": form, "file": str(files[AS_GIVEN].resolve())}
                process = self._start(LLAMA_CPP, request, subprocess.PIPE)
                _, errors = process.communicate()
                if process.returncode:
                    self.skipped[f"{LLAMA_CPP}, {form}"] = last_line(errors)
                    print(f"skipped: {LLAMA_CPP}, {form}: {last_line(errors)}", flush=True)
                    continue
            files[form] = place
        return files


def forms_of(model: str, in_torch: Sequence[str] = tuple(FORMS)) -> Sequence[str]:
    return LLAMA_CPP_FORMS if model == LLAMA_CPP else in_torch


def named(kind: str, model: str, form: str, length: int) -> str:
    return f"{model}, {form}, {kind} at {length:,} tokens"


def figure_of(found: dict[str, Any]) -> str:
    if "seconds" in found:
        return f"{found['seconds']:.2f} s, {found['tokens_per_second']:,.0f} tokens/s"
    return f"{found['milliseconds_per_token']:.1f} ms a token"


def shape_of(folder: Path, teacher: str | None) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    name = "random weights" if teacher is None else Path(teacher).name
    return {"name": name} | {field: config[field] for field in fields}


def command_of(given: argparse.Namespace) -> str:
    """The one that measures all that figures may hold, however many times it was stopped and told to do a part."""
    words = [] if given.teacher is None else [Path(given.teacher).name]
    for name, usual in vars(parser_of_arguments().parse_args([])).items():
        if name in SETTINGS and getattr(given, name) != usual:
            words += [f"--{name}", f"{getattr(given, name):g}"]
    return f"python {shlex.join(['benchmarks/long_context.py', *words])}"


def figures_of(given: argparse.Namespace) -> dict[str, Any]:
    """Those that the output holds, to be continued, or new ones.

    Raises:
        FileExistsError: it holds measurements of other settings.
    """
    settings = {"weights": identity(given.teacher)} | {name: getattr(given, name) for name in SETTINGS}
    settings |= {"torch": torch.__version__, "transformers": transformers.__version__}
    figures = provenance() | {"command": command_of(given), "settings": settings, "llama_cpp": None, "cells": {}}
    if given.output.is_file() and not given.overwrite:
        earlier = json.loads(given.output.read_text(encoding="utf-8"))
        found = earlier.get("settings", {})
        if other := sorted(name for name in settings.keys() | found if settings.get(name) != found.get(name)):
            raise FileExistsError(
                f"{given.output} has measurements of other settings: {other[0]}={found.get(other[0])!r}, now "
                f"{settings.get(other[0])!r}. Name another file, or give --overwrite."
            )
        figures |= {"llama_cpp": earlier["llama_cpp"], "cells": earlier["cells"]}
    return figures | {"skipped": given.skipped}


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of_arguments()
    given = checked(parser, arguments)
    torch.set_num_threads(given.threads)
    try:
        measurement = Measurement(given, figures_of(given))
    except FileExistsError as error:
        parser.error(f"--output: {error}")
    for name, why in measurement.skipped.items():
        print(f"skipped: {name}: {why}", flush=True)
    measurement.run()
    measurement.write()
    if measurement.failed:
        sys.exit("\n".join(["failed:", *measurement.failed]))
    if left := measurement.left():
        print(f"not measured yet: {len(left)}, first {named(*left[0])}; the same command goes on with them.")


if __name__ == "__main__":
    main()
