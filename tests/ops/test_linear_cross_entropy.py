"""The chunked linear cross-entropy against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy


def draw(rows, width, classes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, width, generator=generator), torch.randn(classes, width, generator=generator)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), torch.randn(classes, generator=generator).to(dtype), labels


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    chunk=st.integers(1, 15),
    reduction=st.sampled_from(["mean", "sum"]),
    with_bias=st.booleans(),
    ignored=st.sets(st.integers(0, 11)),
)
def test_equals_the_plain_loss(rows, chunk, reduction, with_bias, ignored):
    hidden, weight, bias, labels = draw(rows, 5, 7)
    labels[[i for i in ignored if i < rows - 1]] = -100  # at least one label counts
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    twins = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    options = {"bias": leaves[2]} if with_bias else {}
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, reduction=reduction, chunk_size=chunk, **options)
    plain = F.cross_entropy(F.linear(twins[0], twins[1], twins[2] if with_bias else None), labels, reduction=reduction)
    torch.testing.assert_close(loss, plain)
    (3 * loss).backward()
    (3 * plain).backward()
    for ours, expected in zip(leaves, twins):
        if expected.grad is not None:
            torch.testing.assert_close(ours.grad, expected.grad)


def test_gradcheck():
    hidden, weight, bias, labels = draw(6, 3, 4)
    labels[2] = -100

    def loss(h, w, b):
        return linear_cross_entropy(h, w, labels, bias=b, chunk_size=4)

    assert torch.autograd.gradcheck(loss, [t.requires_grad_() for t in (hidden, weight, bias)])


def test_batched_input_and_number_of_items():
    hidden, weight, _, labels = draw(12, 5, 7, torch.float32)
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    batched = linear_cross_entropy(hidden.view(3, 4, 5), weight, labels.view(3, 4), reduction="sum", num_items=24)
    torch.testing.assert_close(batched, total / 24)
    tensor = linear_cross_entropy(hidden, weight, labels, reduction="sum", num_items=torch.tensor(24))
    torch.testing.assert_close(tensor, batched)


def test_never_holds_all_logits():
    rows, classes, chunk = 64, 4096, 8
    hidden, weight, _, labels = draw(rows, 8, classes, torch.float32)
    hidden.requires_grad_()
    largest = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    with Largest():
        linear_cross_entropy(hidden, weight, labels, chunk_size=chunk).backward()
    assert max(largest) <= max(chunk * classes, weight.numel())


def test_rows_that_do_not_count_cost_no_products():
    hidden, weight, _, labels = draw(40, 8, 16, torch.float32)
    hidden.requires_grad_()

    def flops(labels):
        with FlopCounterMode(display=False) as counter:
            linear_cross_entropy(hidden, weight, labels).backward()
        return counter.get_total_flops()

    sparse = labels.where(torch.arange(40) % 10 == 3, -100)
    assert 0 < flops(sparse) == flops(labels) / 10
    nothing = torch.full_like(labels, -100)
    assert flops(nothing) == 0
    assert linear_cross_entropy(hidden, weight, nothing, reduction="sum") == 0
    assert linear_cross_entropy(hidden, weight, nothing).isnan()


def test_bfloat16_accumulates_in_float32():
    hidden, weight, _, labels = draw(200, 16, 50, torch.bfloat16)
    leaf = weight.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, leaf, labels, chunk_size=3)
    loss.backward()
    exact = weight.double().requires_grad_()
    plain = F.cross_entropy(hidden.double() @ exact.T, labels)
    plain.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), plain, rtol=1e-2, atol=0)
    assert (leaf.grad.double() - exact.grad).abs().max() < 0.02 * exact.grad.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(7, 4, dtype=torch.float64)}, ValueError, "weight must have shape"),
        ({"weight": torch.zeros(7, 5)}, TypeError, "weight must have dtype"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, "labels"),
        ({"reduction": "none"}, ValueError, "reduction='none'"),
        ({"num_items": 4}, ValueError, "num_items"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"labels": torch.full((6,), 9)}, ValueError, "classes from 9 to 9, but weight has 7 rows"),
        ({"labels": torch.zeros(6)}, TypeError, "labels must be int64, got torch.float32"),
    ],
)
def test_refusals(change, error, message):
    hidden, weight, _, labels = draw(6, 5, 7)
    with pytest.raises(error, match=message):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **change})
