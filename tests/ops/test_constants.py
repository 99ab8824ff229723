"""Tensors that follow from sizes alone: computed once, whatever is active, and constants to a compiler."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hybrid_ssm.ops.core.constants import constant
from hf_hybrid_ssm.ops.legendre_memory import legendre_memory
from tests.tiny_models import compiles

CPU = torch.device("cpu")


def _counting(size: int) -> torch.Tensor:
    return torch.arange(float(size))


@compiles
def test_a_graph_holds_several_of_one_function_and_of_functions_of_one_name():
    counting, twin = constant(_counting), constant(lambda size: 2 * _counting(size))

    def sums(x):
        short, long, other = counting(2, device=x.device), counting(3, device=x.device), twin(2, device=x.device)
        return x * (short.sum() + 10 * long.sum() + 100 * other.sum() + 1000 * counting(2, device=x.device).sum())

    x = torch.ones(4, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(sums, fullgraph=True, backend="aot_eager")(x)
    compiled.sum().backward()
    assert torch.equal(compiled, sums(x)) and compiled[0] == 1 + 30 + 200 + 1000
    assert torch.equal(x.grad, torch.full((4,), 1231.0))


@pytest.mark.parametrize("active", [torch.inference_mode, lambda: torch.device("meta"), torch.no_grad])
def test_made_once_and_the_same_whatever_is_active(active):
    calls = []
    counting = constant(lambda size: (calls.append(size), _counting(size), size)[1:])
    with active():
        first, size = counting(3, device=CPU)
    again, _ = counting(3, device=CPU)
    assert again is first and size == 3 and calls == [3]
    assert first.tolist() == [0.0, 1.0, 2.0] and first.device == CPU and not first.is_inference()
    (first * torch.ones(3, requires_grad=True)).sum().backward()  # autograd may save it


def test_fake_on_fake_tensors_of_whatever_device_and_real_after_them():
    counting = constant(_counting)
    with FakeTensorMode():
        product = counting(3, device=torch.device("cuda")) * torch.ones(3, device="cuda")
    assert product.shape == (3,) and product.device.type == "cuda"
    assert counting(3, device=CPU).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["order", "theta"])
def test_a_number_that_changes_between_compilations(name):
    """dynamo makes it symbolic at the second value, and no constant follows from a symbol."""
    x, compiled = torch.randn(2, 40, 4), torch.compile(legendre_memory, backend="aot_eager")
    for value in (12, 20, 30):
        sizes = {"order": 8, "theta": 20.0} | {name: type({"order": 8, "theta": 20.0}[name])(value)}
        found, expected = (memory(x, **sizes, backend="torch")[0] for memory in (compiled, legendre_memory))
        torch.testing.assert_close(found, expected)
