"""Compiles the kernels of the plan before there is a card, into Triton's cache (docs/first_card.md packs it).

    TRITON_CACHE_DIR=/tmp/hf-hybrid-ssm-ahead python -m benchmarks.gpu.compile_ahead

With the Python and Triton of the card's machine: a program is found there if Python's minor version, Triton's files,
the card's generation and the kernel's source are the same. A second time, it says how many programs a fresh process
finds. The package's own launches decide what is compiled, with the shapes of `benchmarks.gpu` and, for models, narrow
ones: what the compiler knows of a width is whether it is a multiple of 16.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.settings import Settings

Launch = Callable[[], object]


def doctor(_: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.absent_card import launch_example, ops_with_kernels
    from benchmarks.gpu.doctor import DTYPES

    for name, op in ops_with_kernels().items():
        for dtype in DTYPES:
            for number, example in enumerate(op.examples):
                yield f"{name} {dtype} {number}", partial(launch_example, op, example(), dtype)


def parity(settings: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu import parity as part

    return (case for case in part.cases(settings) if not case[0].startswith("local_attention"))  # torch's code


def models(settings: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu import models as part

    return part.cases(settings)


def scan(settings: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu import scan as part

    for shape in part.SHAPES:
        for backward in (False, True):
            yield str(shape), part.longhorn(settings, shape, backward, "triton")
    for block in part.BLOCKS:
        both = part.longhorn(settings, part.SHAPES[0], True, "triton")
        yield f"block of {block}", part.with_block(both, part.SHAPES[0][3], block, settings)


def decoding(_: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu.decoding import DECODED

    for name in DECODED:
        yield f"a token of {name}", partial(token, name)


def training(_: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu.training import TRAINED

    for name in TRAINED:
        yield name, partial(step, name)


def inspection(settings: "Settings") -> Iterator[tuple[str, Launch]]:
    from benchmarks.gpu import inspection as part
    from benchmarks.gpu.scan import longhorn

    yield "a small scan", longhorn(settings, part.SMALL, True, "triton")


PARTS = (doctor, parity, models, scan, decoding, training, inspection)
"""What each part launches."""


def token(name: str) -> None:
    """Of a model after a prompt."""
    import torch

    from benchmarks.timing.models import build, decoder

    decoder(build(name, 128, 1, vocabulary=256, window=64, dtype=torch.bfloat16), 1)()


def step(name: str) -> None:
    import torch

    from benchmarks.timing.models import batch_of, build, random_rows, training_step

    model = build(name, 128, 1, vocabulary=256, window=64)
    training_step(model, batch_of("plain", random_rows(2, 1024, 256)), autocast=torch.bfloat16)()


def compile_all(capability: int) -> None:
    """How many programs were found in the folder, and how many compiled, is printed for each launch."""
    from benchmarks import absent_card
    from benchmarks.gpu.child import count_compilations
    from benchmarks.gpu.comparing import one_line
    from benchmarks.gpu.settings import Settings

    hits = count_compilations()
    absent_card.install(capability)
    for part in PARTS:
        before = len(hits)
        for name, launch in part(Settings("cpu", False, only_launches=True)):
            seen = len(hits)
            try:
                launch()
            except Exception as error:  # the card compiles what this did not reach
                print(f"{part.__name__}: {name}: {one_line(error)}", flush=True)
            if compiled := hits[seen:].count(False):
                print(f"{part.__name__}: {name}: {compiled} programs compiled", flush=True)
        new = hits[before:]
        print(f"{part.__name__}: {new.count(True)} programs found, {new.count(False)} compiled", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, choices=(80, 90, 100), default=90, help="of the card (default: 90)")
    compile_all(parser.parse_args().capability)
