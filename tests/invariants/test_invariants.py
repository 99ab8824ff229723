"""The promise at the top of the README, for every family and variant.

`python -m tests.reporting invariants` draws many more cases.
"""

import zlib
from random import Random

import pytest

from tests.invariants.cases import CASES, COMBINATIONS
from tests.tiny_models import RARER, language_model

DRAWS = 2
OF_LAYERS = ("split", "padding", "padded_turns", "packing", "batch", "beam_reorder", "rollback", "saved_and_loaded")


@pytest.mark.parametrize(
    ("case", "variant"), COMBINATIONS + [(case, variant) for variant in RARER for case in OF_LAYERS]
)
def test_invariance(case, variant):
    for draw in range(DRAWS):
        seed = zlib.crc32(f"{case} {variant} {draw}".encode())
        CASES[case](language_model(variant), Random(seed))
