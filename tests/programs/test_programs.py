"""A sample of random programs of every family, and the programs that once failed."""

import pytest

from tests.programs.generate import generate
from tests.programs.interpreter import run
from tests.programs.models import FAMILIES, VARIANTS
from tests.programs.program import Compile, Copy, Crop, Feed, Illegal, Program, Reorder, Step
from tests.reporting import THOROUGH

PROGRAMS_PER_FAMILY = 1700 if THOROUGH else 40


def feed(*rows, starts=None, **more) -> Feed:
    return Feed(list(rows), starts or [[] for _ in rows], **more)


def program(variant: str, *steps: Step, head: str = "lm", **more) -> Program:
    return Program(variant, head, steps=list(steps), **more)


NAN = {"inputs": "nan", "mask": "full"}
ONCE_FAILED = {
    "refused crop": program("longhorn", feed([3, 4]), Illegal("deep crop"), feed([5]), record=True, dtype="float64"),
    "deepcopy after crop": program("spade ema", feed([3, 4, 5]), Crop(1), Copy(), feed([6]), record=True),
    "mask of these columns": program("longhorn + full attention", feed([3]), feed([4], mask="current")),
    "decoder's mask of these columns": program(
        "encoder-decoder", feed([3]), feed([4], mask="current"), sources=[[5, 6]]
    ),
    "NaN before a row": program("longhorn + window and full attention", feed([None, 6], **NAN)),
    "NaN in a row's first feed": program("longhorn", feed([None, 6], **NAN), feed([7])),
    "NaN in a row without a token": program(
        "longhorn + window and full attention", feed([3], [None], **NAN), feed([4], [5], mask="full")
    ),
    "NaN after a source": program(
        "encoder-decoder relative window", feed([3], [4], inputs="nan"), sources=[[5, 6, 7], [8]], head="base"
    ),
    "a piece begins a document": program(
        "spade s4 window", feed([3, 4], packing="seq_idx"), feed([5, 6], starts=[[0]], packing="seq_idx")
    ),
    "a piece goes on with a document": program(
        "longhorn + full attention", feed([3, 4], starts=[[1]], packing="seq_idx"), feed([5, 6], packing="seq_idx")
    ),
    "positions begin a document": program(
        "bst sh s4d", feed([3, 4], packing="positions"), feed([5, 6], starts=[[0]], packing="positions")
    ),
    "padding before a document is undone": [
        program(
            variant,
            feed([8], [9], packing="seq_idx"),
            feed([None, None, 6, 18], [3, 4, 5, 6], starts=[[2], [1]], packing="seq_idx", mask="full"),
            Crop(3),
            feed([19], [20]),
            record=True,
            dtype="float64",
        )
        for variant in (
            "longhorn + window and full attention",
            "spade ema in all layers",
            "bst block-recurrent",
            "lmu-isa + global attention",
        )
    ],
    "undone before a document": program(
        "longhorn",
        feed([4, None, 6], starts=[[2]], packing="seq_idx", mask="full"),
        Crop(1),
        feed([18]),
        record=True,
        dtype="float64",
    ),
    "masks that contradict the past": [
        program(
            variant,
            feed([None, 4, 5], [6, None, None], mask="full"),
            Illegal("past padding as text"),
            feed([3, 7], [8, 9], mask="current"),
            Illegal("past text as padding"),
            Crop(1),
            Illegal("past padding elsewhere"),
            Reorder([1, 0]),
            Illegal("past padding as text"),
            feed([10, None], [11, 12], mask="full"),
            record=True,
            **({"sources": [[5, 6], [7]]} if "encoder" in variant else {}),
        )
        for variant in (
            "longhorn + window and full attention",
            "spade s4 window",
            "bst sh s4d",
            "lmu-isa",
            "encoder-decoder relative window",
        )
    ],
    "cu_seq_lens": program("lmu-isa", feed([3, 4, 5], starts=[[1]], packing="cu_seq_lens")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(family):
    names = [name for name, variant in VARIANTS.items() if variant.family == family]
    for seed in range(PROGRAMS_PER_FAMILY):
        drawn = generate(seed, names[seed % len(names)], compiled=False)
        outcome = run(drawn)
        assert outcome.failure is None, f"{outcome.failure}\n{drawn}"


@pytest.mark.parametrize("name", ONCE_FAILED)
def test_what_once_failed(name):
    programs = ONCE_FAILED[name]
    for once in programs if isinstance(programs, list) else [programs]:
        assert run(once).failure is None, once


@pytest.mark.parametrize("variant", ["longhorn + window and full attention", "lmu-isa"])
def test_compiled_programs(variant):
    """Packed by positions, with a cache that is empty at first."""
    packed = program(
        variant,
        Compile("eager"),
        feed([3, 4, 5, 6], starts=[[2]], packing="positions"),
        feed([7], packing="positions"),
    )
    assert run(packed).failure is None
