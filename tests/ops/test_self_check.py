"""A kernel that is wrong on this device is not used, and says so once."""

import logging
import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from hf_hybrid_ssm.doctor import every_op
from hf_hybrid_ssm.ops.core import dispatch, transforms
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.core.self_check import BOUNDS, largest_error


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wrong_value, wrong_gradient):
        ctx.factor = 2.1 if wrong_gradient else 2.0
        return x * (2.1 if wrong_value else 2.0)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


def wrong_value(x):
    return (Doubling.apply(x, True, False),)


def wrong_gradient(x):
    return (Doubling.apply(x, False, True),)


def not_finite(x):
    return (Doubling.apply(x, False, False) * torch.nan,)


def raises(x):
    raise RuntimeError("illegal instruction")


def right(x):
    return (Doubling.apply(x, False, False),)


@pytest.fixture
def make_op(monkeypatch):
    def make(kernel, supports=lambda device_type, dtype: None):
        module = ModuleType("doubling_kernel")
        module.doubling_native, module.supports = kernel, supports
        monkeypatch.setitem(sys.modules, "doubling_kernel", module)
        examples = (lambda: torch.arange(1.0, 9.0), lambda: torch.arange(1.0, 99.0))
        plain = {"torch": lambda x: (x * 2,), "reference": lambda x: (x + x,)}
        op = Op("doubling", plain, {"native": "doubling_kernel"}, examples)
        return op

    yield make
    dispatch.REGISTRY.pop("doubling", None)


def test_every_example_counts(make_op):
    """A kernel that is wrong for larger sizes only, for which it takes another way."""
    op = make_op(lambda x: (Doubling.apply(x, len(x) > 20, False),))
    assert "its self-check" in op.unavailable("native", "cpu", torch.float32)


def one_by_one(setting):
    """As newer versions of torch are asked for TF32."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has one setting for all libraries")
    torch.backends.cuda.matmul.fp32_precision = setting


ASKED = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "one by one": lambda: one_by_one("tf32"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_products_keep_float32_inside_of_a_self_check(make_op, asked):
    """A kernel that leaves products to torch would fail for good where the user asked for TF32."""
    seen = []

    def kernel(x):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32))
        return right(x)

    try:
        ASKED[asked]()
        before = transforms.float32_precision()
        assert make_op(kernel).unavailable("native", "cpu", torch.float32) is None
        assert set(seen) == {("highest", False)} and transforms.float32_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_right_kernel_is_used(make_op, caplog):
    op = make_op(right)
    assert op.select("cpu", torch.float32) is right
    assert op.self_check("native", "cpu", torch.float32) < 1e-6
    assert not caplog.records


@pytest.mark.parametrize(
    "kernel, said",
    [(wrong_value, "off by"), (wrong_gradient, "off by"), (not_finite, "off by inf"), (raises, "illegal instruction")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_kernel_is_not_used_and_says_so_once(make_op, caplog, kernel, said, dtype):
    op = make_op(kernel)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert op.select("cpu", dtype) is op.builtin["torch"]
    about_the_check = [r for r in caplog.records if "self-check" in r.getMessage() and "will not be used" in r.message]
    assert len(about_the_check) == 1 and said in about_the_check[0].getMessage()
    with pytest.raises(ValueError, match="self-check"):
        op.select("cpu", dtype, "native")


def test_a_missing_kernel_warns_once(make_op, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_LOGGED_REASONS", set())
    op = make_op(right, supports=lambda device_type, dtype: "no compiler was found")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert op.select("cpu", torch.float32) is op.builtin["torch"]
        op.select("cpu", torch.float64)
    assert [r.getMessage() for r in caplog.records] == [
        "doubling runs its torch implementation on cpu, slower than the native kernel: no compiler was found."
    ]


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta-device": lambda: torch.device("meta"),
    "fake-tensors": FakeTensorMode,
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_the_first_use_may_lie_anywhere(make_op, surrounding):
    op = make_op(right)
    with surrounding():
        assert op.select("cpu", torch.float32) is right
    assert op.self_check("native", "cpu", torch.float32) < 1e-6


def test_the_first_use_may_lie_in_a_checkpoint(make_op):
    """The recomputation has no such use, and must not miss what the check saved for its own gradients."""
    op, x = make_op(right), torch.ones(3, requires_grad=True)
    checkpoint(lambda x: op.select("cpu", x.dtype)(x)[0].sin(), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.full((3,), 2.0).cos())


def test_the_first_use_may_lie_in_a_compiled_function(make_op):
    op = make_op(right)
    double = torch.compile(lambda x: op.select(x.device.type, x.dtype)(x)[0], fullgraph=True, backend="eager")
    torch.testing.assert_close(double(torch.ones(3)), torch.full((3,), 2.0))
    assert op.self_check("native", "cpu", torch.float32) < 1e-6


KERNELS = {name: op for name, op in sorted(every_op().items()) if op.kernels}
# FlexAttention is torch's, which makes its code by itself
OURS = [name for name, op in KERNELS.items() if "flex_attention" not in op.kernels.get("triton", "flex_attention")]


def in_float64(given):
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, given)


@pytest.mark.parametrize("name", KERNELS)
def test_examples_are_what_the_op_takes(name):
    """And the kernel here is found right on them."""
    op = KERNELS[name]
    for example in op.examples:
        got, want = (op.builtin[backend](in_float64(example())) for backend in ("torch", "reference"))
        for one, other in zip(tuple(got), tuple(want), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    if "native" in op.kernels and missing_compiler() is None:
        assert op.explain("cpu", torch.float32)["native"] == "runs"


@pytest.mark.parametrize(
    "name", ["longhorn_scan", "longhorn_step", "causal_conv", "causal_conv_step", "implicit_attention"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_examples_allow_for_the_rounding_of_16_bits(name, dtype):
    """Of ops that take 16 bits as they are: beyond the bound by torch's own code, an example would refuse kernels that
    are right."""
    op = KERNELS[name]
    for example in op.examples:
        kernel, reference = op.builtin["torch"], op.builtin["reference"]
        error = largest_error(kernel, reference, example, "cpu", dtype, gradients=op.differentiable)
        assert error <= BOUNDS[dtype], example.__name__


@pytest.mark.parametrize("name", OURS)
def test_examples_have_rows_that_are_aligned_and_some_that_are_not(name):
    """Compilers for cards make other code of the two, and models have the first."""
    op, sizes = KERNELS[name], set()
    for example in op.examples:
        given = example()
        x = given[0]
        if name == "long_conv":  # its rows are tokens of a channel
            sizes.add(x.shape[1] + given.history.shape[1])
        else:
            sizes.add(x.shape[2 if name == "diagonal_scan" else -1])
    assert {size % 16 == 0 for size in sizes} == {True, False}
