"""The kernels of the linear scans against the float64 reference: C, or Triton where it runs or is interpreted.

`test_triton.py` runs this file once more, in Triton's interpreter.
"""

import os

import pytest
import torch

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition
from tests.row_options import diagonal_scan, lti_scan

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
BACKEND = "triton" if INTERPRETS or torch.cuda.is_available() else "native"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = 4e-6  # relative to the largest entry
if INTERPRETS:
    from benchmarks import interpreter  # noqa: F401 - lets old versions run
pytestmark = pytest.mark.skipif(BACKEND == "native" and missing_compiler() is not None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory is filled with NaN, so that a kernel that leaves a number unwritten is found out."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def decays(form: str, *shape: int) -> torch.Tensor:
    """In float64, most of them near 1, where rounding them to float32 would show after some hundred tokens."""
    radius = torch.sigmoid(4 + 2 * draw(*shape, seed=1).double())
    return radius if form == "real" else torch.view_as_real(torch.polar(radius, 3 * draw(*shape, seed=2).double()))


def documents(batch: int, length: int, starts: bool | list[int] = True) -> torch.Tensor:
    """That begin at some tokens, by default at random ones."""
    begins = torch.rand(batch, length, generator=torch.Generator().manual_seed(9)) < 0.07
    if isinstance(starts, list):
        begins = torch.zeros_like(begins).index_fill(1, torch.tensor(starts), 1)
    return begins.int().cumsum(1).to(DEVICE)


def measured(op, inputs: dict) -> dict:
    """Outputs, and the gradients of a random projection of all of them."""
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    outputs = op(**inputs)
    loss = sum((o * draw(*o.shape, seed=90 + i).to(o.dtype)).sum() for i, o in enumerate(outputs))
    gradients = torch.autograd.grad(loss, list(inputs.values()))
    return {str(i): o for i, o in enumerate(outputs)} | {f"d{n}": g for n, g in zip(inputs, gradients)}


def assert_agree(got: dict, want: dict) -> None:
    for name, wanted in want.items():
        error = (got[name].double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)
        assert error <= BOUND, f"{name}: {error:.1e}"


CHANNELS = {
    "one token": {"shape": (2, 1, 1, 3, 4)},
    "blocks": {"shape": (2, 75, 2, 3, 6)},
    "real": {"shape": (2, 70, 2, 3, 3), "form": "real"},
    "many channels": {"shape": (1, 33, 1, 37, 2)},
    "long": {"shape": (1, 100 if INTERPRETS else 3000, 1, 2, 4)},
    "bare": {"shape": (1, 40, 1, 3, 4), "optional": False},
    "packed": {"shape": (2, 75, 2, 3, 4), "packed": True},
    "padded": {"shape": (3, 40, 2, 3, 4), "lengths": [40, 7, 0]},
    "packed padded real": {"shape": (2, 40, 1, 3, 4), "packed": True, "lengths": [40, 33], "form": "real"},
}


@pytest.mark.parametrize("case", CHANNELS.values(), ids=CHANNELS.keys())
def test_lti_scan(case):
    case = {"form": "complex", "packed": False, "lengths": None, "optional": True} | case
    (batch, length, filters, channels, size), form = case["shape"], case["form"]
    inputs = {"u": draw(batch, length, channels, seed=3)}
    inputs["decay"] = decays(form, filters, channels, size // 2 if form == "complex" else size)
    inputs |= {"vector": draw(filters, channels, size, seed=4), "output": draw(filters, channels, size, seed=5)}
    if case["optional"]:
        inputs["skip"] = draw(filters, channels, seed=6)
        inputs["initial_state"] = draw(batch, filters, channels, size, seed=7)
    lengths = None if case["lengths"] is None else torch.tensor(case["lengths"], device=DEVICE)
    seq_idx = documents(batch, length, case["packed"]) if case["packed"] else None

    def scan(backend, u, decay, vector, output, **options):
        system = ChannelSystem(Transition(decay, form), vector, output)
        rows = {"seq_idx": seq_idx, "lengths": lengths, "return_final_state": True}
        y, state = lti_scan(u, system, backend=backend, **rows, **options)
        if lengths is not None:
            real = torch.arange(length, device=DEVICE) < lengths.unsqueeze(1)
            assert y.isfinite().all()
            y = torch.where(real[..., None, None], y, 0.0)
        return y, state

    got = measured(lambda **tensors: scan(BACKEND, **tensors), inputs)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    assert_agree(got, measured(lambda **tensors: scan("reference", **tensors), wide))


def test_frozen_systems_get_no_gradient():
    u, vector, output = draw(1, 40, 3, seed=1).requires_grad_(), draw(1, 3, 4, seed=2), draw(1, 3, 4, seed=3)
    system = ChannelSystem(Transition(decays("real", 1, 3, 4), "real"), vector, output)
    wide = system._replace(vector=vector.double(), output=output.double())
    gradients = []
    for backend, one in ((BACKEND, system), ("reference", wide)):
        y, _ = lti_scan(u.to(one.output.dtype), one, backend=backend)
        gradients += torch.autograd.grad(y.square().sum(), u)
    assert_agree({"du": gradients[0]}, {"du": gradients[1]})


DIAGONALS = {
    "one token": {"shape": (2, 1, 3)},
    "blocks": {"shape": (2, 75, 5)},
    "real": {"shape": (2, 70, 5), "form": "real"},
    "many channels": {"shape": (1, 33, 70)},
    "long": {"shape": (1, 100 if INTERPRETS else 3000, 2)},
    "bare": {"shape": (1, 40, 3), "optional": False},
    "packed": {"shape": (2, 75, 3), "packed": True},
    "packed, whole splits": {"shape": (2, 90, 3), "packed": [40, 81]},
    "packed at a split's end": {"shape": (1, 96, 3), "packed": [32, 64]},
    "packed real": {"shape": (2, 40, 3), "packed": True, "form": "real", "optional": False},
}


@pytest.mark.parametrize("splits", [1, 3] if BACKEND == "triton" else [1])
@pytest.mark.parametrize("case", DIAGONALS.values(), ids=DIAGONALS.keys())
def test_diagonal_scan(case, splits, monkeypatch):
    if BACKEND == "triton":
        from hf_hybrid_ssm.ops.linear_scan import diagonal_splits

        monkeypatch.setattr(diagonal_splits, "diagonal_splits", lambda *_: splits)
    case = {"form": "complex", "packed": False, "optional": True} | case
    (batch, length, channels), pair = case["shape"], (2,) if case["form"] == "complex" else ()
    inputs = {"decay": decays(case["form"], channels), "x": draw(batch, length, channels, *pair, seed=3)}
    if case["optional"]:
        inputs["initial_state"] = draw(batch, channels, *pair, seed=4)
    seq_idx = documents(batch, length, case["packed"]) if case["packed"] else None

    def scan(backend, **tensors):
        if pair:
            tensors = {name: torch.view_as_complex(tensor) for name, tensor in tensors.items()}
        start = tensors.get("initial_state")
        results = diagonal_scan(
            tensors["decay"], tensors["x"], initial_state=start, seq_idx=seq_idx, return_final_state=True,
            backend=backend,
        )  # fmt: skip
        return [torch.view_as_real(part) if pair else part for part in results]

    got = measured(lambda **tensors: scan(BACKEND, **tensors), inputs)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    assert_agree(got, measured(lambda **tensors: scan("reference", **tensors), wide))


def test_ops_are_well_registered():
    """Schema, fake implementation and autograd registration."""
    from hf_hybrid_ssm.ops.linear_scan import native

    module = native
    if BACKEND == "triton":
        from hf_hybrid_ssm.ops.linear_scan import triton as module
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    shapes = ((1, 3, 2), (1, 2, 2), (1, 2, 2), (1, 2), (1, 1, 2, 2))
    u, vector, output, skip, start = (draw(*shape, seed=1).requires_grad_() for shape in shapes)
    decay = decays("real", 1, 2, 2).requires_grad_()
    tensors = (u, decay, vector, output, skip, start, documents(1, 3).long(), torch.tensor([2], device=DEVICE))
    torch.library.opcheck(module._channel, (*tensors, "real", True), test_utils=checks)
    x, start = draw(1, 3, 4, 2, seed=1).requires_grad_(), draw(1, 4, 2, seed=2).requires_grad_()
    torch.library.opcheck(module._diagonal, (x, decays("complex", 4), start, None), test_utils=checks)


def test_gradients_repeat_bit_for_bit():
    decay, x = torch.view_as_complex(decays("complex", 5)), torch.view_as_complex(draw(2, 70, 5, 2, seed=1))
    decay, x = decay.requires_grad_(), x.requires_grad_()
    first, second = (
        torch.autograd.grad(diagonal_scan(decay, x, backend=BACKEND)[0].abs().sum(), (decay, x)) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))
