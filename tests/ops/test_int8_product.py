"""Rows times a weight of 8 bits: every backend against the product in float64."""

import pytest
import torch

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.int8_product import int8_product

NATIVE = pytest.param("native", marks=pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler"))
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def drawn(rows: int, columns: int, outputs: int, dtype: torch.dtype, shift: int = 0):
    """x, scales, and codes that begin `shift` bytes after an aligned address."""
    random = torch.Generator().manual_seed(rows + columns + outputs)
    x = torch.randn(rows, columns, generator=random).to(dtype)
    scales = torch.rand(outputs, generator=random).to(dtype)
    codes = torch.empty(outputs * columns + shift, dtype=torch.int8)[shift:].view(outputs, columns)
    return x, codes.copy_(torch.randint(-128, 128, codes.shape, generator=random)), scales


def check(x, codes, scales, backend):
    y = int8_product(x, codes, scales, backend=backend)
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    assert y.dtype == x.dtype and y.shape == expected.shape
    torch.testing.assert_close(
        y.double(), expected, rtol=0, atol=TOLERANCES[x.dtype] * 128 * max(codes.shape[1], 1) ** 0.5
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE])
def test_product(backend, dtype):
    if backend == "native" and dtype == torch.float64:
        with pytest.raises(ValueError, match="too coarse"):
            int8_product(*drawn(1, 16, 3, dtype), backend=backend)
        return
    for columns in (1, 7, 16, 63, 64, 80, 147, 576):
        for rows in (1, 2, 3, 4, 7, 16):
            check(*drawn(rows, columns, 37, dtype, shift=rows % 3), backend)


@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE])
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(0, 32, 5), (2, 32, 0), (2, 0, 5)])
def test_nothing(rows, columns, outputs, backend):
    check(*drawn(rows, columns, outputs, torch.float32), backend)


@pytest.mark.parametrize("backend", [NATIVE])
def test_threads_change_nothing(backend):
    given, threads = drawn(5, 576, 333, torch.float32), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(int8_product(*given, backend=backend))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("columns", [64, 72])
def test_sums_beyond_float16(columns, backend):
    """Scaled, they are within it again."""
    x, codes = torch.full((2, columns), 10.0).half(), torch.full((3, columns), 127, dtype=torch.int8)
    y = int8_product(x, codes, torch.full((3,), 1e-3).half(), backend=backend)
    torch.testing.assert_close(y.float(), torch.full((2, 3), 1.27 * columns), rtol=2e-3, atol=0)


@pytest.mark.parametrize("backend", [NATIVE])
def test_a_row_is_the_same_beside_others(backend):
    x, codes, scales = drawn(16, 147, 37, torch.float32)
    together = int8_product(x, codes, scales, backend=backend)
    for rows in (1, 2, 3, 5):
        assert torch.equal(int8_product(x[:rows], codes, scales, backend=backend), together[:rows])


@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE])
def test_nothing_has_a_gradient(backend):
    x, codes, scales = drawn(2, 33, 5, torch.float32)
    assert not int8_product(x.requires_grad_(), codes, scales, backend=backend).requires_grad


def test_what_is_not_finite_stays_in_its_row():
    x, codes, scales = drawn(3, 64, 37, torch.float32)
    x[1, 5], scales[7] = float("nan"), float("inf")
    for backend in ("torch", None):
        y = int8_product(x, codes, scales, backend=backend)
        assert y[1].isnan().all() and not y[[0, 2]].isfinite()[:, 7].any()
        assert y[[0, 2]][:, torch.arange(37) != 7].isfinite().all()


def test_refused():
    x, codes, scales = drawn(2, 16, 5, torch.float32)
    for error, match, given in (
        (TypeError, "codes must be int8, got torch.float32", (x, codes.float(), scales)),
        (TypeError, "scales must have dtype torch.float32", (x, codes, scales.double())),
        (ValueError, r"codes must have shape \(O, I\) = \(any, 16\), got \(5, 15\)", (x, codes[:, 1:], scales)),
        (ValueError, r"scales must have shape \(O\) = \(5\), got \(4,\)", (x, codes, scales[1:])),
        (ValueError, r"x must have shape \(R, I\)", (x[0], codes, scales)),
    ):
        with pytest.raises(error, match=match):
            int8_product(*given)
