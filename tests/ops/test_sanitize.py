"""A slice of `python -m tests.reporting sanitize`: one small kernel under the sanitizers, a few random calls of all
of them without.
"""

import pytest

from hf_hybrid_ssm.ops.core.native_build import missing_compiler
from tests.ops import random_cases, sanitize

pytestmark = pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")


def test_sanitizers_find_nothing():
    if reason := sanitize.missing_sanitizer():
        pytest.skip(reason)
    assert sanitize.run(["system_token"], cases=20).returncode == 0


@pytest.mark.parametrize("name", random_cases.CASES)
def test_random_calls_equal_the_reference(name):
    for seed in range(2 if name == "attention" else 5):
        assert random_cases.deviation(name, seed) <= sanitize.LIMITS.get(name, sanitize.LIMIT), seed
