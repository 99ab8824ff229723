"""The chunked divergence of two linear layers' outputs against that of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence


def draw(rows, classes=7, dtype=torch.float64):
    """hidden (T, 5), weight (V, 5), those of a teacher of width 3, and weights of rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, 5), (classes, 5), (rows, 3), (classes, 3))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return (*tensors, torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype))


def plain(hidden, weight, teacher_hidden, teacher_weight, row_weights, temperature):
    """The definition, in whole matrices."""
    p, q = (F.softmax(h @ w.T / temperature, -1) for h, w in ((teacher_hidden, teacher_weight), (hidden, weight)))
    divergences = (p * (p.log() - q.log())).sum(-1)
    return temperature**2 * (row_weights * divergences).sum() / row_weights.sum()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    chunk=st.integers(1, 15),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    weighted=st.booleans(),
    ignored=st.sets(st.integers(0, 11)),
)
def test_equals_the_definition(rows, chunk, temperature, weighted, ignored):
    *tensors, row_weights = draw(rows)
    row_weights[[i for i in ignored if i < rows - 1]] = 0  # at least one row counts
    leaves, twins = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    options = {"row_weights": row_weights} if weighted else {}
    loss = linear_kl_divergence(*leaves, temperature=temperature, chunk_size=chunk, **options)
    expected = plain(*twins, row_weights if weighted else torch.ones(rows).double(), temperature)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    for ours, twin in zip(leaves[:2], twins[:2]):
        torch.testing.assert_close(ours.grad, twin.grad)
    assert leaves[2].grad is None and leaves[3].grad is None  # the teacher learns nothing


def test_gradcheck():
    hidden, weight, *others, row_weights = draw(6)

    def loss(h, w):
        return linear_kl_divergence(h, w, *others, row_weights=row_weights, temperature=2.0, chunk_size=4)

    assert torch.autograd.gradcheck(loss, [hidden.requires_grad_(), weight.requires_grad_()])


def test_the_same_layer_is_no_distance_away():
    hidden, weight, *_ = draw(9)
    hidden.requires_grad_()
    loss = linear_kl_divergence(hidden.view(3, 3, 5), weight, hidden.detach().view(3, 3, 5), weight)
    loss.backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), atol=1e-12, rtol=0)


def test_never_holds_all_logits():
    rows, classes, chunk = 64, 4096, 8
    *tensors, _ = draw(rows, classes, torch.float32)
    largest = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    tensors[0].requires_grad_()
    with Largest():
        linear_kl_divergence(*tensors, chunk_size=chunk).backward()
    assert max(largest) <= max(chunk * classes, tensors[1].numel())


def test_rows_that_do_not_count_cost_no_products():
    *tensors, _ = draw(40, dtype=torch.float32)
    tensors[0].requires_grad_()

    def flops(row_weights):
        with FlopCounterMode(display=False) as counter:
            linear_kl_divergence(*tensors, row_weights=row_weights).backward()
        return counter.get_total_flops()

    assert 0 < flops((torch.arange(40) % 10 == 3).float()) == flops(torch.ones(40)) / 10
    assert linear_kl_divergence(*tensors, row_weights=torch.zeros(40)).isnan()


def test_bfloat16_accumulates_in_float32():
    *tensors, _ = draw(200, 50, torch.bfloat16)
    hidden, weight = (tensor.requires_grad_() for tensor in tensors[:2])
    loss = linear_kl_divergence(*tensors, chunk_size=3)
    loss.backward()
    exact = [tensor.detach().double() for tensor in tensors]
    for tensor in exact[:2]:
        tensor.requires_grad_()
    expected = plain(*exact, torch.ones(200).double(), 1.0)
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-2, atol=0)
    for ours, twin in zip((hidden, weight), exact):
        assert (ours.grad.double() - twin.grad).abs().max() < 0.03 * twin.grad.abs().max()


def test_a_cached_teacher_may_be_narrower_than_the_student():
    """Its states and weights in bfloat16, the student's in float32."""
    hidden, weight, theirs, their_weight, _ = draw(9, dtype=torch.float32)
    loss = linear_kl_divergence(hidden, weight, theirs.bfloat16(), their_weight.bfloat16())
    wide = linear_kl_divergence(hidden, weight, theirs, their_weight)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wide, rtol=3e-2, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.zeros(7, 4, dtype=torch.float64)}, ValueError, "weight must have shape"),
        ({"weight": torch.zeros(7, 5)}, TypeError, "weight must have dtype"),
        ({"teacher_hidden": torch.zeros(5, 3)}, ValueError, "teacher_hidden must have shape"),
        ({"teacher_weight": torch.zeros(8, 3, dtype=torch.float64)}, ValueError, "teacher_weight must have shape"),
        ({"teacher_weight": torch.zeros(7, 3)}, TypeError, "teacher_weight must have dtype"),
        ({"row_weights": torch.zeros(5)}, ValueError, "row_weights must have shape"),
        ({"row_weights": -torch.ones(6)}, ValueError, "row_weights must not be negative, got -1"),
        ({"temperature": 0.0}, ValueError, r"temperature=0\.0 must be positive"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
    ],
)
def test_refusals(change, error, message):
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight", "row_weights")
    with pytest.raises(error, match=message):
        linear_kl_divergence(**dict(zip(names, draw(6))) | change)
