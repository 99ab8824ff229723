"""Compiles the kernels of the first half hour on a card before there is one: a folder that Triton finds them in there.

    python -m benchmarks.gpu.compile_ahead --cache FOLDER           # here, with the card's Python and Triton
    python -m benchmarks.gpu.compile_ahead --cache FOLDER --check   # there: does this Triton take them?
    python -m benchmarks.gpu.compile_ahead --count                  # how many programs that is, by part

The folder has the same path on both sides, since Triton writes absolute paths into it, and TRITON_CACHE_DIR names it
there. A program is found again if Python's minor version, Triton's files, the card's generation and the kernels'
source are the same: `--check` compares the first two, and what is not found is compiled as if nothing had been
carried. Once more here, the command says how many programs a fresh process finds.

The package's own launches decide what is compiled, with the shapes of `benchmarks.gpu` and, for models, narrow ones:
what the compiler knows of a width is whether it is a multiple of 16.
"""

import argparse
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.settings import Settings

KEY = "key.txt"
KEPT = (".cubin", ".json", ".txt")  # of a program; the rest is for reading
Launch = Callable[[], object]


def key() -> str:
    """Of the Triton that compiles: another finds nothing in the folder."""
    from triton.runtime.cache import triton_key

    python = ".".join(map(str, sys.version_info[:2]))
    return f"Python {python}, Triton {hashlib.sha256(triton_key().encode()).hexdigest()[:16]}"


def doctor(_: "Settings") -> Iterator[tuple[str, Launch]]:
    import torch

    from benchmarks.absent_card import launch_example, ops_with_kernels
    from benchmarks.gpu.doctor import DTYPES

    for name, op in ops_with_kernels().items():
        for dtype in (*DTYPES, torch.float16):  # the last by `parity`, where kernels must be chosen first
            for number, example in enumerate((op.self_check_inputs, *op.further_inputs)):
                yield f"{name} {dtype} {number}", partial(launch_example, op, example(), dtype)


def parity(settings: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu import parity as part

    return (case for case in part.cases(settings) if not case[0].startswith("local_attention"))  # torch's code


def scan(settings: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu import scan as part

    for shape in part.SHAPES:
        for backward in (False, True):
            yield str(shape), part.longhorn(settings, shape, backward, "triton")
    for block in part.BLOCKS:
        both = part.longhorn(settings, part.SHAPES[0], True, "triton")
        yield f"block of {block}", part.with_block(both, part.SHAPES[0][3], block, settings)


def decoding(_: "Settings") -> Iterator[tuple[str, Launch]]:
    yield "a Longhorn's prompt and token", token


def training(_: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu.families import FAMILIES, ROWS

    for name in FAMILIES:
        for rows in ROWS:
            yield f"{name} {rows}", partial(step, name, rows, autocast=True)


def models(_: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu.families import FAMILIES, ROWS

    for name in FAMILIES:
        for rows in ROWS:
            yield f"{name} {rows}", partial(step, name, rows, autocast=False)


PARTS = {
    "doctor": doctor,
    "parity": parity,
    "scan": scan,
    "decoding": decoding,
    "training": training,
    "models": models,
}
"""What each part launches; the others launch nothing else, or none of these kernels."""


def token() -> None:
    """Of a Longhorn after a prompt."""
    import torch

    from benchmarks.timing.models import build, decoder

    decoder(build("Longhorn", 128, 1, vocabulary=256, dtype=torch.bfloat16), 1)()


def step(name: str, rows: str, *, autocast: bool) -> None:
    import torch

    from benchmarks.timing.models import batch_of, build, random_rows, training_step

    model = build(name, 128, 1, vocabulary=256, window=64)
    inputs = batch_of(rows, random_rows(2, 1024, 256))
    training_step(model, inputs, autocast=torch.bfloat16 if autocast else None)()


def compile_all(capability: int, parts: list[str]) -> tuple[int, int]:
    """How many programs were found in the folder, and how many compiled."""
    from triton import knobs

    from benchmarks import absent_card
    from benchmarks.gpu.comparing import one_line
    from benchmarks.gpu.settings import Settings

    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    absent_card.install(capability)
    for part in parts:
        for name, launch in PARTS[part](Settings("cpu", False, only_launches=True)):
            before = len(hits)
            try:
                launch()
            except Exception as error:  # the card compiles what this did not reach
                print(f"{part}: {name}: {one_line(error)}", flush=True)
            if new := hits[before:]:
                print(f"{part}: {name}: {len(new)} programs, {new.count(False)} of them compiled", flush=True)
    return hits.count(True), hits.count(False)


def count(capability: int, parts: list[str]) -> None:
    """How many programs each part has that those before it have not; nothing is compiled."""
    from benchmarks import absent_card
    from benchmarks.gpu.settings import Settings

    asked = absent_card.install(capability, compiles=False)
    for part in parts:
        before = len(asked)
        for _, launch in PARTS[part](Settings("cpu", False, only_launches=True)):
            launch()
        names = Counter(each.kernel.fn.__name__ for each in asked[before:])
        print(f"{part}: {len(asked) - before} programs: {dict(names.most_common())}", flush=True)
    print(f"{len(asked)} programs")


def slim(cache: Path) -> float:
    """Leave what a launch reads; → megabytes."""
    files = [file for file in cache.rglob("*") if file.is_file()]
    for file in files:
        if file.suffix not in KEPT:
            file.unlink()
    return sum(file.stat().st_size for file in files if file.exists()) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="an absolute path, the same on both sides")
    parser.add_argument("--capability", type=int, choices=(80, 90, 100), default=90, help="of the card (default: 90)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of `benchmarks.gpu`")
    parser.add_argument("--count", action="store_true", help="only say how many programs there are")
    parser.add_argument("--check", action="store_true", help="only compare this Triton with the folder's")
    options = parser.parse_args()
    if options.count:
        count(options.capability, options.parts)
        return 0
    if options.cache is None or not options.cache.is_absolute():
        parser.error(f"--cache {options.cache}: Triton writes absolute paths into it, so give one")
    mark = options.cache / KEY
    if options.check:
        if not mark.is_file():
            parser.error(f"--cache {options.cache}: there is no {KEY}")
        made = mark.read_text(encoding="utf-8").strip()
        print(f"made with {made}; here {key()}: {'the same' if made == key() else 'nothing will be found'}")
        return int(made != key())
    os.environ["TRITON_CACHE_DIR"] = str(options.cache)
    options.cache.mkdir(parents=True, exist_ok=True)
    if mark.is_file() and mark.read_text(encoding="utf-8").strip() != key():
        parser.error(f"--cache {options.cache}: it is of another Triton; give an empty folder")
    mark.write_text(key() + "\n", encoding="utf-8")
    found, compiled = compile_all(options.capability, options.parts)
    print(f"{found} programs were found, {compiled} compiled; {options.cache}: {slim(options.cache):.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
