"""`differentiable_op`: gradients of what is given and needed, of nothing else, and an op that torch finds in order."""

import pytest
import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op

needs = []


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, shift: Tensor, power: int) -> tuple[Tensor, Tensor]:
    scaled = x * weight
    return scaled**power + shift + (0 if bias is None else bias), scaled


def backward(inputs, gradients, needed):
    x, weight, _, _, power, scaled = inputs
    needs.append(needed)
    dscaled = power * scaled ** (power - 1) * gradients[0] + gradients[1]
    return dscaled * weight, dscaled * x, gradients[0].clone()


POWER = differentiable_op(
    "hf_hybrid_ssm::power_for_the_test",
    forward,
    backward,
    lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    saved=lambda inputs, outputs: (inputs, outputs[1:]),
)


def arguments(biased):
    x, weight, bias = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    leaves = [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_() if biased else None]
    return leaves, (*leaves, torch.arange(4), 3)


@pytest.mark.parametrize("biased", [False, True])
def test_gradients(biased):
    leaves, inputs = arguments(biased)
    given = [leaf for leaf in leaves if leaf is not None]
    results = []
    for op in (POWER, forward):
        y, scaled = op(*inputs)
        results.append((y, scaled, *torch.autograd.grad((y * y).sum() + scaled.sin().sum(), given)))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


def test_only_what_is_needed_gets_a_gradient():
    (x, weight, _), inputs = arguments(biased=False)
    weight.requires_grad_(False)
    POWER(*inputs)[0].sum().backward()
    assert list(needs[-1]) == [True, False, False, False, False]
    assert x.grad is not None and weight.grad is None


def test_torch_finds_the_op_in_order():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(POWER, arguments(biased=True)[1], test_utils=checks)
