"""`differentiable_op`: gradients of what is given and needed, of nothing else, and an op that torch finds in order."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, filled

needs, absent = [], []


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    shift: Tensor
    power: int
    said: object = "torch.library does not take it"


def forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    x, weight, bias, shift, power, _ = inputs
    scaled = x * weight
    return scaled**power + shift + (0 if bias is None else bias), scaled


def backward(inputs, gradients, needed, scaled):
    x, weight, _, _, power, _ = inputs
    needs.append(needed)
    absent.append([part is None for part in gradients])
    gradients = filled(gradients, lambda: 2 * [x.new_empty(x.shape)])
    dscaled = power * scaled ** (power - 1) * gradients[0] + gradients[1]
    return dscaled * weight, dscaled * x, gradients[0].clone()


POWER = differentiable_op(
    "hf_hybrid_ssm::power_for_the_test",
    Inputs,
    forward,
    backward,
    lambda inputs: (inputs.x.new_empty(inputs.x.shape), inputs.x.new_empty(inputs.x.shape)),
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
    for op in (POWER, lambda *fields: forward(Inputs(*fields))):
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
    assert absent[-1] == [False, True]  # nothing depended on the second output


def test_torch_finds_the_op_in_order():
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(POWER, arguments(biased=True)[1], test_utils=checks)
