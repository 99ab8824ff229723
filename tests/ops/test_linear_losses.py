"""The chunked losses of a linear layer's outputs, cross-entropy and divergence, against those of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_hybrid_ssm.ops.linear_cross_entropy import linear_cross_entropy
from hf_hybrid_ssm.ops.linear_kl_divergence import linear_kl_divergence


def draw(rows, classes=7, dtype=torch.float64):
    """hidden (T, 5), weight (V, 5) and what it is compared with: bias and labels; a teacher's, and weights of rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (rows, 5), "weight": (classes, 5), "bias": (classes,)}
    shapes |= {"teacher_hidden": (rows, 3), "teacher_weight": (classes, 3)}
    drawn = {n: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for n, shape in shapes.items()}
    drawn["row_weights"] = torch.rand(rows, generator=generator, dtype=torch.float64).to(dtype)
    return drawn | {"labels": torch.randint(0, classes, (rows,), generator=generator)}


OF_ENTROPY = ("hidden", "weight", "labels")
OF_TEACHER = ("hidden", "weight", "teacher_hidden", "teacher_weight")


def entropy(drawn, counts=None, **options):
    """Labels of rows that do not count are ignored."""
    labels = drawn["labels"] if counts is None else drawn["labels"].where(counts, -100)
    return linear_cross_entropy(**{name: drawn[name] for name in OF_ENTROPY} | {"labels": labels}, **options)


def divergence(drawn, counts=None, **options):
    """Rows that do not count weigh nothing."""
    options |= {} if counts is None else {"row_weights": counts.to(drawn["hidden"].dtype)}
    return linear_kl_divergence(**{name: drawn[name] for name in OF_TEACHER}, **options)


def plain_entropy(drawn, **options):
    return F.cross_entropy(F.linear(drawn["hidden"], drawn["weight"], options.pop("bias", None)), **options)


def plain_divergence(drawn, row_weights=None, temperature=1.0):
    """The definition, in whole matrices."""
    theirs, ours = ((drawn[f"{of}hidden"], drawn[f"{of}weight"]) for of in ("teacher_", ""))
    p, q = (F.softmax(h @ w.T / temperature, -1) for h, w in (theirs, ours))
    divergences = (p * (p.log() - q.log())).sum(-1)
    weights = torch.ones_like(divergences) if row_weights is None else row_weights
    return temperature**2 * (weights * divergences).sum() / weights.sum()


LOSSES = pytest.mark.parametrize("loss", [entropy, divergence])


def with_leaves(drawn, *names):
    """Twice the same, with gradients."""
    return [{n: t.clone().requires_grad_() if n in names else t for n, t in drawn.items()} for _ in range(2)]


def assert_same_gradients(ours, plain, found, names):
    torch.testing.assert_close(ours, plain)
    (3 * ours).backward()
    (3 * plain).backward()
    for name in names:
        torch.testing.assert_close(found[0][name].grad, found[1][name].grad)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    chunk=st.integers(1, 15),
    reduction=st.sampled_from(["mean", "sum"]),
    with_bias=st.booleans(),
    ignored=st.sets(st.integers(0, 11)),
)
def test_entropy_equals_the_plain_one(rows, chunk, reduction, with_bias, ignored):
    drawn, names = draw(rows), ("hidden", "weight", "bias") if with_bias else ("hidden", "weight")
    drawn["labels"][[i for i in ignored if i < rows - 1]] = -100  # at least one label counts
    found = with_leaves(drawn, *names)
    ours, plain = ({"bias": one["bias"]} if with_bias else {} for one in found)
    loss = entropy(found[0], reduction=reduction, chunk_size=chunk, **ours)
    wanted = plain_entropy(found[1], target=drawn["labels"], reduction=reduction, **plain)
    assert_same_gradients(loss, wanted, found, names)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 12),
    chunk=st.integers(1, 15),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    weighted=st.booleans(),
    ignored=st.sets(st.integers(0, 11)),
)
def test_divergence_equals_the_definition(rows, chunk, temperature, weighted, ignored):
    drawn = draw(rows)
    drawn["row_weights"][[i for i in ignored if i < rows - 1]] = 0  # at least one row counts
    found, options = with_leaves(drawn, *OF_TEACHER), {"temperature": temperature}
    options |= {"row_weights": drawn["row_weights"]} if weighted else {}
    loss = divergence(found[0], chunk_size=chunk, **options)
    assert_same_gradients(loss, plain_divergence(found[1], **options), found, ("hidden", "weight"))
    assert found[0]["teacher_hidden"].grad is None and found[0]["teacher_weight"].grad is None  # it learns nothing


@LOSSES
def test_gradcheck(loss):
    drawn = draw(6)
    options = {"bias": drawn["bias"].requires_grad_()} if loss is entropy else {"temperature": 2.0}
    leaves = [drawn["hidden"].requires_grad_(), drawn["weight"].requires_grad_(), *list(options.values())[:1]]

    def value(hidden, weight, other):
        own = {"bias": other} if loss is entropy else options
        return loss(drawn | {"hidden": hidden, "weight": weight}, torch.arange(6) != 2, chunk_size=4, **own)

    assert torch.autograd.gradcheck(value, leaves)


def test_batched_input_and_number_of_items():
    drawn = draw(12, dtype=torch.float32)
    total = entropy(drawn, reduction="sum")
    by_row = {"hidden": drawn["hidden"].view(3, 4, 5), "labels": drawn["labels"].view(3, 4)}
    for number in (24, torch.tensor(24)):
        torch.testing.assert_close(entropy(drawn | by_row, reduction="sum", num_items=number), total / 24)


def test_the_same_layer_is_no_distance_away():
    drawn = draw(9)
    hidden = drawn["hidden"].requires_grad_()
    same = {"teacher_hidden": hidden.detach().view(3, 3, 5), "teacher_weight": drawn["weight"]}
    loss = divergence(drawn | same | {"hidden": hidden.view(3, 3, 5)})
    loss.backward()
    torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-12, rtol=0)
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), atol=1e-12, rtol=0)


@LOSSES
def test_never_holds_all_logits(loss):
    classes, chunk, largest = 4096, 8, []
    drawn = draw(64, classes, torch.float32)
    drawn["hidden"].requires_grad_()

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    with Largest():
        loss(drawn, chunk_size=chunk).backward()
    assert max(largest) <= max(chunk * classes, drawn["weight"].numel())


@LOSSES
def test_rows_that_do_not_count_cost_no_products(loss):
    drawn = draw(40, dtype=torch.float32)
    drawn["hidden"].requires_grad_()

    def flops(counts):
        with FlopCounterMode(display=False) as counter:
            loss(drawn, counts).backward()
        return counter.get_total_flops()

    every, nothing = torch.ones(40, dtype=torch.bool), torch.zeros(40, dtype=torch.bool)
    assert 0 < flops(torch.arange(40) % 10 == 3) == flops(every) / 10
    assert loss(drawn, nothing).isnan()
    if loss is entropy:
        assert flops(nothing) == 0 and entropy(drawn, nothing, reduction="sum") == 0


@LOSSES
def test_bfloat16_accumulates_in_float32(loss):
    drawn = draw(200, 50, torch.bfloat16)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in drawn.items()}
    (ours, _), (twin, _) = with_leaves(drawn, "hidden", "weight"), with_leaves(exact, "hidden", "weight")
    value = loss(ours, chunk_size=3)
    plain = plain_entropy(twin, target=twin["labels"]) if loss is entropy else plain_divergence(twin)
    value.backward()
    plain.backward()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), plain, rtol=1e-2, atol=0)
    for name in ("hidden", "weight"):
        difference = (ours[name].grad.double() - twin[name].grad).abs().max()
        assert difference < 0.03 * twin[name].grad.abs().max()


def test_a_cached_teacher_may_be_narrower_than_the_student():
    """Its states and weights in bfloat16, the student's in float32."""
    drawn = draw(9, dtype=torch.float32)
    narrow = {name: drawn[name].bfloat16() for name in ("teacher_hidden", "teacher_weight")}
    loss = divergence(drawn | narrow)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, divergence(drawn), rtol=3e-2, atol=0)


@pytest.mark.parametrize(
    ("loss", "change", "error", "message"),
    [
        (entropy, {"weight": torch.zeros(7, 4, dtype=torch.float64)}, ValueError, "weight must have shape"),
        (entropy, {"weight": torch.zeros(7, 5)}, TypeError, "weight must have dtype"),
        (entropy, {"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, "labels"),
        (entropy, {"reduction": "none"}, ValueError, "reduction='none'"),
        (entropy, {"num_items": 4}, ValueError, "num_items"),
        (entropy, {"chunk_size": 0}, ValueError, "chunk_size=0"),
        (entropy, {"labels": torch.full((6,), 9)}, ValueError, "classes from 9 to 9, but weight has 7 rows"),
        (entropy, {"labels": torch.zeros(6)}, TypeError, "labels must be int64, got torch.float32"),
        (divergence, {"weight": torch.zeros(7, 4, dtype=torch.float64)}, ValueError, "weight must have shape"),
        (divergence, {"weight": torch.zeros(7, 5)}, TypeError, "weight must have dtype"),
        (divergence, {"teacher_hidden": torch.zeros(5, 3)}, ValueError, "teacher_hidden must have shape"),
        (divergence, {"teacher_weight": torch.zeros(8, 3).double()}, ValueError, "teacher_weight must have shape"),
        (divergence, {"teacher_weight": torch.zeros(7, 3)}, TypeError, "teacher_weight must have dtype"),
        (divergence, {"row_weights": torch.zeros(5)}, ValueError, "row_weights must have shape"),
        (divergence, {"row_weights": -torch.ones(6)}, ValueError, "row_weights must not be negative, got -1"),
        (divergence, {"temperature": 0.0}, ValueError, r"temperature=0\.0 must be positive"),
        (divergence, {"chunk_size": 0}, ValueError, "chunk_size=0"),
    ],
)
def test_refusals(loss, change, error, message):
    drawn = draw(6)
    tensors = {name: value for name, value in change.items() if name in (*OF_ENTROPY, *OF_TEACHER)}
    with pytest.raises(error, match=message):
        loss(drawn | tensors, **{name: value for name, value in change.items() if name not in tensors})
