"""The promise at the top of the README, for every family and variant.

`python -m tests.reporting invariants` draws many more cases.
"""

import zlib
from random import Random

import pytest

from tests.invariants.cases import CASES, COMBINATIONS
from tests.tiny_models import language_model

DRAWS = 4


@pytest.mark.parametrize(("case", "variant"), COMBINATIONS)
def test_invariance(case, variant):
    for draw in range(DRAWS):
        seed = zlib.crc32(f"{case} {variant} {draw}".encode())
        CASES[case](language_model(variant), Random(seed))
