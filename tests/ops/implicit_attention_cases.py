"""The Triton kernels of implicit attention against the float64 reference; run as `triton_cases.py` is."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.implicit_attention import triton as launcher
from hf_hybrid_ssm.ops.implicit_attention import triton_kernels as kernels
from tests.counting import count_operations
from tests.ops.triton_cases import (
    BOUNDS,
    DEVICE,
    Recorder,
    assert_agree,
    documents,
    gradients,
    poisoned_memory,  # noqa: F401
    random,
)
from tests.row_options import implicit_attention

CASES = {  # shape: batch, length, channels, order, rows
    "ragged": {"shape": (2, 37, 5, 6, 2)},
    "one-block": {"shape": (2, 3, 7, 4, 3), "scale": 1.0},
    "many-channels": {"shape": (1, 20, 67, 5, 5)},
    "many-rows": {"shape": (1, 17, 3, 19, 33), "state": True},
    "large-memory": {"shape": (1, 33, 3, 130, 3), "state": True, "theta": 40.0},
    "bare": {"shape": (2, 32, 5, 6, 1), "optional": False},
    "state": {"shape": (2, 40, 5, 6, 2), "state": True, "form": "fft"},
    "padded": {"shape": (4, 50, 3, 5, 2), "lengths": [50, 32, 17, 0], "state": True},
    "packed": {"shape": (2, 40, 3, 5, 2), "packed": True, "lengths": [40, 21], "state": True},
    "segments": {"shape": (1, 161, 3, 3, 2), "segments": 4, "theta": 3.0, "state": True},
    "segments-padded": {"shape": (2, 128, 3, 3, 2), "segments": 3, "theta": 3.0, "lengths": [69, 5]},
    "groups": {"shape": (2, 70, 3, 5, 2), "held": 2**11},
    "bfloat16": {"shape": (2, 40, 5, 6, 3), "dtype": torch.bfloat16, "state": True},
    "float16": {"shape": (1, 40, 5, 6, 3), "dtype": torch.float16},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_agrees_with_reference(case, monkeypatch):
    case = {"dtype": torch.float32, "optional": True, "theta": 9.0, "scale": 0.3, "form": "auto"} | case
    monkeypatch.setattr(launcher, "BLOCK", 16)
    monkeypatch.setattr(launcher, "HELD", case.get("held", 2**27))
    if "segments" in case:
        assert launcher.blocks_remembered(3, 3.0, 16) == 2  # fewer than there are blocks before a segment
        monkeypatch.setattr(launcher, "segments_of", lambda *_: case["segments"])
    batch, length, channels, order, rows = case["shape"]
    inputs = {"x": random(batch, length, channels, seed=1), "weight": random(3, rows, order, seed=2) / order**0.5}
    inputs["collapse"] = random(rows, seed=3)
    options = {"theta": case["theta"], "scale": case["scale"], "form": case["form"], "bias": None}
    if case["optional"]:
        inputs |= {"bias": random(3, rows, seed=4), "collapse_bias": random(1, seed=5)}
        del options["bias"]
    inputs = {name: t.to(case["dtype"]) for name, t in inputs.items()}
    if "state" in case:
        inputs["initial_state"] = random(batch, order, channels, seed=6)
    options["seq_idx"] = documents(batch, length) if "packed" in case else None
    if "lengths" in case:
        options["lengths"] = torch.tensor(case["lengths"], device=DEVICE)

    def outputs(backend):
        def run(**arguments):
            y, state = implicit_attention(**arguments, backend=backend)
            if "lengths" in case:  # what is put out after them has no meaning
                y = y.masked_fill(torch.arange(length, device=DEVICE)[:, None] >= options["lengths"][:, None, None], 0)
            return y, state

        return run

    got = gradients(outputs("triton"), inputs, None, **options)
    want = gradients(outputs("reference"), inputs, torch.float64, **options)
    assert all(t is None or t.isfinite().all() for t in got.values())
    assert got["state"].dtype == torch.float32
    assert_agree(got, want, BOUNDS[case["dtype"]])


def leaves(length=40, channels=3, dtype=torch.float32):
    shapes = ((2, length, channels), (3, 2, 5), (3, 2), (2,), (1,))
    return [random(*shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.fixture
def launches(monkeypatch):
    """The grids of all kernels, by kernel."""
    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    recorders = {name: Recorder(getattr(kernels, name)) for name in names}
    for name, recorder in recorders.items():
        monkeypatch.setattr(kernels, name, recorder)
    return recorders


@pytest.mark.parametrize("dtype, most", [(torch.float32, 11), (torch.bfloat16, 15)])
def test_a_training_step_is_few_operations(dtype, most, launches):
    """Each kernel is launched once. A kernel's operation counts once, and holds no others but sums of its parts."""
    arguments = leaves(64, dtype=dtype)
    y, _ = implicit_attention(*arguments, theta=9.0, backend="triton")  # makes the constants
    for recorder in launches.values():
        recorder.grids.clear()
    gradient = torch.ones_like(y)

    def step():
        y, _ = implicit_attention(*arguments, theta=9.0, backend="triton")
        torch.autograd.grad(y, arguments, gradient)

    assert count_operations(step).total() <= most
    assert [len(recorder.grids) for recorder in launches.values()] == [1, 1, 1, 1]
    assert all(len(grid) == 1 for recorder in launches.values() for grid in recorder.grids)


@pytest.mark.parametrize(
    "options",
    [{"form": "recurrent"}, {"form": "fft"}, {"activation": F.silu}, {"length": 2}, {"length": 0}, {"rows": 65}],
    ids=str,
)
def test_torch_does_what_the_kernels_do_not(options, launches):
    options = {"length": 20, "rows": 2} | options
    length, rows = options.pop("length"), options.pop("rows")
    x, weight, collapse = random(1, length, 2, seed=1), random(3, rows, 4, seed=2), random(rows, seed=3)
    y, _ = implicit_attention(x, weight, None, collapse, theta=9.0, **options, backend="triton")
    assert not any(recorder.grids for recorder in launches.values())
    exact = (t.double() for t in (x, weight))
    want, _ = implicit_attention(*exact, None, collapse.double(), theta=9.0, **options, backend="reference")
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_gradients_repeat_bit_for_bit():
    arguments = leaves()
    first, second = (
        torch.autograd.grad(implicit_attention(*arguments, theta=9.0, backend="triton")[0].sum(), arguments)
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_rows_are_cut_only_where_a_card_would_idle():
    assert launcher.segments_of(8 * 32, 64, 32, 132) == 1  # B=8, D=1024: enough programs
    assert launcher.segments_of(32, 2048, 32, 132) == 8  # B=1, L=65,536
    assert launcher.segments_of(32, 100, 32, 132) == 1  # most of it would be done twice


@pytest.mark.parametrize(
    "rows, size, tokens", [(1, 16, 16), (5, 16, 3), (9, 32, 3), (16, 16, 1), (22, 32, 1), (40, 64, 1)]
)
def test_tokens_that_share_a_tile(rows, size, tokens):
    tile = launcher.attention_tile(rows, torch.float32)
    assert (tile["P"], tile["TOKENS"]) == (size, tokens)


def test_ops_are_well_registered():
    """Schema, fake implementation and autograd registration; and a trace of the whole as one graph."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    x, lengths = random(2, 40, 3, seed=1).requires_grad_(), torch.tensor([40, 3], device=DEVICE)
    state = random(2, 5, 3, seed=2).requires_grad_()
    for arguments in ((x, None, None, 5, 9.0, False), (x, state, lengths, 5, 9.0, True)):
        torch.library.opcheck(launcher._memories, arguments, test_utils=checks)
    rows, parameters = random(6 * 32, 4 * 3, seed=3).requires_grad_(), random(9, seed=4).requires_grad_()
    torch.library.opcheck(launcher._attention, (rows, parameters, 3, 2, 0.5), test_utils=checks)

    def step(*arguments):
        return implicit_attention(*arguments, theta=9.0, return_final_state=True, backend="triton")

    arguments = leaves()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        got, want = (
            torch.autograd.grad(sum(t.square().sum() for t in f(*arguments)), arguments) for f in (compiled, step)
        )
    torch.testing.assert_close(got, want)
