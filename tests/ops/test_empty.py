"""Ops of no rows and of rows without tokens: results of the right shape, whatever the backend."""

import pytest
import torch

from hf_hybrid_ssm.ops.core.dispatch import REGISTRY, backend
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from tests.ops.test_transforms import attention_and_sink
from tests.row_options import (
    causal_conv,
    diagonal_scan,
    implicit_attention,
    legendre_memory,
    local_attention,
    long_conv,
    longhorn_scan,
    lti_scan,
)

HEADS, D, N = 2, 3, 4
END = {"return_final_state": True}


def system() -> ChannelSystem:
    return ChannelSystem(Transition(torch.rand(1, D, N), "real"), torch.randn(1, D, N), torch.randn(1, D, N))


def parts(result) -> list[torch.Tensor]:
    """The tensors of an output and its state."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in parts(part)]


# of x (B, L, D): what is computed, with states where there are any
OPS = {
    "longhorn_scan": lambda x: longhorn_scan(x, x, x.new_ones(*x.shape[:2], N), x.new_ones(*x.shape[:2], N), **END),
    "causal_conv": lambda x: causal_conv(x, torch.randn(D, 4), torch.randn(D), activation="silu", **END),
    "long_conv": lambda x: long_conv(x, torch.randn(D, 20), **END),
    "local_attention": lambda x: local_attention(*[x.unsqueeze(1)] * 3, window=(6, 0), **END),
    "local_attention with a sink": lambda x: attention_and_sink(
        *[x.unsqueeze(1).expand(-1, HEADS, -1, -1)] * 3, torch.randn(HEADS, 7), torch.randn(HEADS, D)
    ),
    "legendre_memory": lambda x: legendre_memory(x, torch.randn(2, N), order=N, theta=9.0, **END),
    "implicit_attention": lambda x: implicit_attention(
        x, torch.randn(3, 2, N), None, torch.randn(2), None, theta=9.0, **END
    ),
    "diagonal_scan": lambda x: diagonal_scan(torch.rand(D), x, **END),
    "lti_scan": lambda x: lti_scan(x, system(), **END),
}
CASES = [
    (case, name)
    for case in OPS
    for name in ("reference", "torch", "native")
    if name != "native" or "native" in REGISTRY[case.split()[0]].kernels
]


@pytest.mark.parametrize(("case", "name"), CASES)
@pytest.mark.parametrize(("rows", "length"), [(0, 37), (2, 0), (0, 0)])
def test_shapes_are_those_of_any_rows(case, name, rows, length):
    """The shapes of results for more rows and tokens, with these sizes in place of those."""
    with backend(name):
        usual = parts(OPS[case](torch.randn(rows + 5, length + 11, D)))
        found = parts(OPS[case](torch.randn(rows, length, D)))
    assert len(found) == len(usual)
    for empty, tensor in zip(found, usual):
        expected = [rows if size == rows + 5 else length if size == length + 11 else size for size in tensor.shape]
        assert list(empty.shape) == expected and empty.isfinite().all()


@pytest.mark.parametrize(("case", "name"), CASES)
def test_gradients_of_no_rows(case, name):
    x = torch.randn(0, 9, D, requires_grad=True)
    with backend(name):
        y = parts(OPS[case](x))[0]
        if y.requires_grad:
            assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert y.shape[0] == 0
