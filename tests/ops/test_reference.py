"""Every implementation against the float64 reference, gradients included: random calls, and the same under sanitizers.

`python -m tests.reporting sanitize` draws more of them, of the C kernels.
"""

import pytest
import torch

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from tests.ops import random_cases, sanitize

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")
TAKES = {torch.float64: 1e-10, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Deviations that are allowed; of float32, those of `sanitize`."""
CASES = [
    *(("torch", name, torch.float64) for name in random_cases.CASES if name != "implicit_token"),
    *(pytest.param("native", name, torch.float32, marks=needs_compiler) for name in random_cases.CASES),
    *(
        pytest.param(backend, name, dtype, marks=needs_compiler if backend == "native" else ())
        for backend in ("torch", "native")
        for name in ("longhorn_token", "convolution_token")
        for dtype in (torch.bfloat16, torch.float16)
    ),
]


@pytest.mark.parametrize("backend, name, dtype", CASES, ids=str)
def test_random_calls_equal_the_reference(backend, name, dtype):
    limit = TAKES.get(dtype) or sanitize.LIMITS.get(name, sanitize.LIMIT)
    for seed in range(4 if name in ("attention", "implicit") else 12):
        assert random_cases.deviation(name, seed, backend, dtype) <= limit, seed


@needs_compiler
def test_sanitizers_find_nothing():
    if reason := sanitize.missing_sanitizer():
        pytest.skip(reason)
    assert sanitize.run(["system_token"], cases=20).returncode == 0
