"""C kernels at the edges of their blocks: every length next to a multiple of a block, and widths next to a vector.

The memory that results are written into holds NaN before the call (torch fills what is not initialised, if it may use
deterministic algorithms only), so that what a kernel leaves out is not what an earlier call left there.
"""

import re
from pathlib import Path

import pytest
import torch

import hf_hybrid_ssm.ops
from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from tests.ops.test_empty import parts
from tests.row_options import causal_conv, diagonal_scan, implicit_attention, local_attention, longhorn_scan, lti_scan

SOURCES = Path(hf_hybrid_ssm.ops.__file__).parent
BLOCKS = {
    int(size)
    for path in SOURCES.glob("*/native.c")
    for size in re.findall(r"^#define (?:BLOCK|LEAST_SEGMENT) (\d+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}
LENGTHS = sorted({length for block in BLOCKS for k in (1, 2) for length in (k * block - 1, k * block, k * block + 1)})
LANES = 16
WIDTHS = [1, LANES - 1, LANES, LANES + 1, 3 * LANES + 1]
END = {"return_final_state": True}

pytestmark = pytest.mark.skipif(
    REGISTRY["causal_conv"].unavailable("native", "cpu", torch.float32) is not None, reason="no C kernels"
)


def scanned(x, decay, entering, output, skip, **options):
    system = ChannelSystem(Transition(decay.sigmoid(), "real"), entering, output)
    return lti_scan(x, system, skip=skip, **END, **options)


def attended(x, k, v, bias, **options):
    heads = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in (x, k, v))
    return local_attention(*heads, bias=bias, window=(6, 0), **END, **options)


# name → a function of tensors, and the shapes of those of length L and width D
CASES = {
    "causal_conv": (
        lambda x, w, b, **o: causal_conv(x, w, b, activation="silu", **END, **o),
        lambda L, D: [(2, L, D), (D, 4), (D,)],
    ),
    "longhorn_scan": (
        lambda *t, **o: longhorn_scan(*t[:4], D=t[4], beta_bias=t[5], z=t[6], **END, **o),
        lambda L, D: [(2, L, D), (2, L, D), (2, L, 5), (2, L, 5), (D,), (D,), (2, L, D)],
    ),
    "lti_scan": (scanned, lambda L, D: [(2, L, D), (1, D, 4), (1, D, 4), (1, D, 4), (1, D)]),
    "diagonal_scan": (
        lambda x, a, **o: diagonal_scan(a.sigmoid(), x, **END, **o),
        lambda L, D: [(2, L, D), (D,)],
    ),
    "local_attention": (attended, lambda L, D: [(2, L, 2 * D)] * 3 + [(2, 7)]),
    "implicit_attention": (
        lambda x, w, b, c, **o: implicit_attention(x, w, b, c, None, theta=9.0, **END, **o),
        lambda L, D: [(2, L, D), (3, 2, 4), (3, 2), (2,)],
    ),
}


def test_every_kernel_of_rows_is_here():
    of_tokens, named_otherwise = {"int8_product"}, {"linear_scan"}
    folders = {path.parent.name for path in SOURCES.glob("*/native.c")} - of_tokens - named_otherwise
    assert BLOCKS and set(CASES) == folders | {"lti_scan", "diagonal_scan"}


@pytest.fixture
def poisoned():
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(2)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def results(run, tensors, **options):
    """Outputs, states, and the gradients of all tensors."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    found = parts(run(*leaves, **options))
    total = sum(
        (part * torch.linspace(-1, 1, part.numel()).view_as(part).to(part)).sum()
        for part in found
        if part.is_floating_point()
    )
    return [*(part.detach() for part in found), *torch.autograd.grad(total, leaves)]


def check(case: str, length: int, width: int, **rows):
    run, shapes = CASES[case]
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(shape, generator=generator) / 2 for shape in shapes(length, width)]
    found = results(run, tensors, backend="native", **rows)
    wanted = results(run, [tensor.double() for tensor in tensors], backend="torch", **rows)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        scale = float(other.abs().max())
        torch.testing.assert_close(
            one.to(other.dtype),
            other,
            rtol=2e-4,
            atol=2e-5 * (1 + scale),
            msg=lambda text, number=number: f"result {number}: {text}",
        )


@pytest.mark.parametrize("case", CASES)
def test_lengths_next_to_a_block(case, poisoned):
    for length in LENGTHS:
        check(case, length, 5)


@pytest.mark.parametrize("case", CASES)
def test_widths_next_to_a_vector(case, poisoned):
    for width in WIDTHS:
        check(case, 65, width)


@pytest.mark.parametrize("case", CASES)
def test_documents_that_end_at_a_block(case, poisoned):
    """The first document ends at, before and behind the edge of each block, and one row has no more tokens there."""
    for block in BLOCKS:
        for begins in (block - 1, block, block + 1):
            seq_idx = (torch.arange(block + 9) >= begins).long().expand(2, -1)
            check(case, block + 9, 5, seq_idx=seq_idx, lengths=torch.tensor([block + 9, begins]))
