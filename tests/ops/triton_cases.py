"""The Triton kernels against the float64 reference; run by `test_triton.py` with TRITON_INTERPRET=1.

Uninitialised memory is filled with NaN, so that a kernel that leaves a number unwritten is found out.
"""

import warnings

import pytest
import torch
import triton

from benchmarks import interpreter  # noqa: F401 - lets old versions run
from hf_hybrid_ssm.ops.causal_conv import triton as conv_launcher
from hf_hybrid_ssm.ops.causal_conv.reference import ConvInputs
from hf_hybrid_ssm.ops.core.dispatch import REGISTRY
from hf_hybrid_ssm.ops.long_conv import triton as long_launcher
from hf_hybrid_ssm.ops.longhorn_scan import triton as launcher
from hf_hybrid_ssm.ops.longhorn_scan import triton_sizes
from hf_hybrid_ssm.ops.longhorn_scan.reference import ScanInputs
from tests.row_options import causal_conv, causal_conv_of_token, long_conv, longhorn_scan, longhorn_scan_of_token

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNKS = "chunk_backward_kernel"
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}  # relative to the largest entry


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """As the interpreter takes its time over every operation; lanes that share a channel are P = 4 and more."""
    monkeypatch.setattr(triton_sizes, "BLOCK", 8)
    for table in ("FORWARD", "BACKWARD"):
        sizes = {states: entry | {"S": 4, "T": 4} for states, entry in getattr(triton_sizes, table).items()}
        monkeypatch.setattr(triton_sizes, table, sizes)


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(op, inputs, dtype, **options):
    """Output, state, and the gradients of a random projection of both with respect to all floating inputs."""
    given = next(iter(inputs.values())).dtype
    inputs = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in inputs.items()}
    y, state = op(**inputs, **options, return_final_state=True)
    loss = (y * random(*y.shape, seed=90).to(given).to(y.dtype)).sum() + (state * random(*state.shape, seed=91)).sum()
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {"y": y, "state": state} | {f"d{name}": grad for name, grad in zip(inputs, found)}


def assert_agree(got, want, bound):
    assert got.keys() == want.keys()
    for name in got:
        if want[name] is None or want[name].numel() == 0:
            continue
        scale = want[name].abs().max().clamp(min=1e-3)
        error = (got[name].double() - want[name]).abs().max() / scale
        assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


class Recorder:
    """Stands for a kernel and keeps the grids it was launched with, and in a list, if one is given, the kernel."""

    def __init__(self, kernel, launched=None):
        self.kernel, self.grids, self.launched = kernel, [], [] if launched is None else launched

    def __getitem__(self, grid):
        self.grids.append(grid)
        self.launched.append(self.kernel)
        return self.kernel[grid]


def scan_inputs(batch, length, channels, states, dtype, optional=True, heads=()):
    inputs = {"x": random(batch, length, channels, seed=1), "beta_logit": random(batch, length, channels, seed=2)}
    inputs |= {name: random(batch, length, *heads, states, seed=3 + index) for index, name in enumerate("kq")}
    if optional:
        inputs["z"] = random(batch, length, channels, seed=5)
    inputs = {name: t.to(dtype) for name, t in inputs.items()}
    if optional:
        inputs |= {"beta_bias": random(channels, seed=6), "D": random(channels, seed=7)}
        inputs["initial_state"] = random(batch, channels, states, seed=8)
    return inputs


def documents(batch, length):
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(9)) < 0.2
    return starts.int().cumsum(1).to(DEVICE)


SCANS = {
    "one-token": {"shape": (2, 1, 3, 4)},
    "ragged": {"shape": (2, 13, 5, 3)},
    "bare": {"shape": (1, 9, 3, 4), "optional": False},
    "many-channels": {"shape": (1, 5, 35, 5)},
    "many-states": {"shape": (1, 5, 3, 17)},
    "one-state": {"shape": (1, 9, 2, 1)},
    "packed": {"shape": (2, 13, 3, 3), "packed": True},
    "padded": {"shape": (3, 11, 3, 4), "lengths": [11, 4, 0]},
    "packed-padded": {"shape": (2, 11, 3, 4), "packed": True, "lengths": [11, 6]},
    "split": {"shape": (2, 21, 3, 3), "splits": 3},
    "split-packed": {"shape": (1, 21, 3, 3), "splits": 2, "packed": True},
    "split-bare": {"shape": (1, 25, 3, 3), "splits": 4, "optional": False},
    "heads": {"shape": (2, 11, 6, 3), "heads": (2,), "packed": True, "lengths": [11, 6]},
    "bfloat16": {"shape": (1, 13, 5, 3), "dtype": torch.bfloat16},
    "float16": {"shape": (1, 13, 5, 3), "dtype": torch.float16, "splits": 2},
}


def in_chunks(monkeypatch):
    """Lets any inputs, float32 and few states among them, go in chunks, two of them in a block."""
    sizes, by_token = {"BD": 16, "num_warps": 1, "STAGES": 1, "BLOCK": 8}, triton_sizes.tile_sizes
    monkeypatch.setattr(triton_sizes, "chunk_sizes", lambda n, *_: sizes | {"N": max(16, triton.next_power_of_2(n))})
    monkeypatch.setattr(triton_sizes, "tile_sizes", lambda n, **options: by_token(max(16, n), **options))


@pytest.mark.parametrize("chunks", [False, True], ids=["by-token", "in-chunks"])
@pytest.mark.parametrize("case", SCANS.values(), ids=SCANS.keys())
def test_scan_agrees_with_reference(case, chunks, monkeypatch):
    if chunks:
        in_chunks(monkeypatch)
    case = {
        "dtype": torch.float32,
        "packed": False,
        "lengths": None,
        "splits": 1,
        "optional": True,
        "heads": (),
    } | case
    monkeypatch.setattr(triton_sizes, "time_splits", lambda *_: case["splits"])
    batch, length = case["shape"][:2]
    inputs = scan_inputs(*case["shape"], case["dtype"], case["optional"], case["heads"])
    options = {"seq_idx": documents(batch, length) if case["packed"] else None, "lengths": None}
    if case["lengths"] is not None:
        options["lengths"] = torch.tensor(case["lengths"], device=DEVICE)
        padding = torch.arange(length, device=DEVICE) >= options["lengths"][:, None]
        if case["packed"]:
            options["seq_idx"] = options["seq_idx"].masked_fill(padding, 0).cummax(1).values
        inputs["z"] = inputs["z"].masked_fill(padding[..., None], 0.0)  # what is put out there has no meaning
    got = gradients(longhorn_scan, inputs, None, backend="triton", **options)
    want = gradients(longhorn_scan, inputs, torch.float64, backend="reference", **options)
    if case["lengths"] is not None:  # the reference reads the gate after the row's end, the kernel does not
        want["dz"], got["dz"] = (t["dz"].masked_fill(padding[..., None], 0.0) for t in (want, got))
    assert all(t is None or t.isfinite().all() for t in got.values())
    assert_agree(got, want, BOUNDS[case["dtype"]])


def test_padding_may_hold_anything(monkeypatch):
    inputs = scan_inputs(2, 9, 3, 4, torch.float32)
    lengths = torch.tensor([9, 5], device=DEVICE)
    want = longhorn_scan(**inputs, lengths=lengths, return_final_state=True, backend="triton")
    for name in ("x", "beta_logit", "k", "q", "z"):
        inputs[name][1, 5:] = torch.nan
    got = longhorn_scan(**inputs, lengths=lengths, return_final_state=True, backend="triton")
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_scan_follows_strides():
    wide = random(2, 6, 20, seed=1)
    x, beta_logit = wide[..., :5], wide[..., 5:10]
    k, q = wide[..., 10:20:3], wide[:, :, 11:20:3].expand(2, 6, 3)
    q = torch.cat([q, q[..., :1]], -1)
    got, _ = longhorn_scan(x, beta_logit, k, q, backend="triton")
    want, _ = longhorn_scan(*(t.double() for t in (x, beta_logit, k, q)), backend="reference")
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunks", [False, True], ids=["by-token", "in-chunks"])
def test_extreme_steps_and_keys(chunks, monkeypatch):
    if chunks:
        in_chunks(monkeypatch)
    inputs = scan_inputs(1, 8, 3, 4, torch.float32)
    logits = torch.tensor([-1e4, -100.0, 0.0, 1e4, 80.0, -80.0, 30.0, 1.0], device=DEVICE)
    inputs["beta_logit"] = logits[None, :, None].repeat(1, 1, 3)
    inputs["k"][0, 3] = torch.tensor([1e3, 0.0, 0.0, 0.0])
    inputs["k"][0, 4] = 0.0
    inputs["k"][0, 5] = 1e-6
    got = gradients(longhorn_scan, inputs, None, backend="triton")
    want = gradients(longhorn_scan, inputs, torch.float64, backend="reference")
    assert_agree(got, want, 2e-6)


@pytest.mark.parametrize("chunks", [False, True], ids=["by-token", "in-chunks"])
def test_gradients_repeat_bit_for_bit(chunks, monkeypatch):
    if chunks:
        in_chunks(monkeypatch)
    monkeypatch.setattr(triton_sizes, "time_splits", lambda *_: 2)
    inputs = scan_inputs(2, 17, 5, 3, torch.float32)
    first, second = (gradients(longhorn_scan, inputs, None, backend="triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("chunks", [False, True], ids=["by-token", "in-chunks"])
@pytest.mark.parametrize("block", triton_sizes.BLOCKS[1:])
def test_blocks_of_a_tuning_agree_with_the_reference(block, chunks, monkeypatch):
    dtype, states = (torch.bfloat16, 32) if chunks else (torch.float32, 3)
    monkeypatch.setitem(triton_sizes.MEASURING, triton_sizes.block_class(states, str(dtype)), {"BLOCK": block})
    inputs = scan_inputs(1, 37, 3, states, dtype)
    got = gradients(longhorn_scan, inputs, None, backend="triton")
    want = gradients(longhorn_scan, inputs, torch.float64, backend="reference")
    assert_agree(got, want, BOUNDS[dtype])


def test_many_states_of_16_bits_go_in_chunks(monkeypatch):
    """And others do not: few states, and float32. So do first passes over a row that is cut."""
    for dtype in (torch.bfloat16, torch.float32):  # the self-check comes first
        REGISTRY["longhorn_scan"].select(DEVICE, dtype, "triton")
    monkeypatch.setattr(triton_sizes, "time_splits", lambda *_: 2)
    launched = []
    by_token = ["forward_summary_kernel", "backward_summary_kernel", "backward_kernel"]
    in_chunks = ["forward_chunk_summary_kernel", "backward_chunk_summary_kernel", CHUNKS]
    modules = (launcher.kernels, launcher.backward_kernels, launcher.chunk_kernels, launcher.chunk_summary_kernels)
    for module in modules:
        for name in {*by_token, *in_chunks} & set(vars(module)):
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launched))
    for states, dtype in ((32, torch.bfloat16), (32, torch.float32), (31, torch.bfloat16)):
        inputs = {name: t.requires_grad_() for name, t in scan_inputs(1, 9, 2, states, dtype, False).items()}
        longhorn_scan(**inputs, backend="triton")[0].sum().backward()
    assert [kernel.fn.__name__ for kernel in launched] == in_chunks + by_token + by_token


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
def test_step_of_the_scan_agrees_with_reference(dtype, bare, heads):
    """One token after another, the state overwritten; the inputs' rows lie apart."""
    batch, length, channels, states = 2, 3, 21, 5
    given = scan_inputs(batch, length, channels, states, dtype, not bare, heads)
    inputs = {name: t.detach() for name, t in given.items()}
    state = inputs.pop("initial_state", torch.zeros(batch, channels, states, device=DEVICE)).clone()
    options = {name: inputs.pop(name) for name in ("beta_bias", "D") if not bare}
    exact = {name: t.double() for name, t in (inputs | options).items()}
    want, final = longhorn_scan(**exact, initial_state=state.double(), return_final_state=True, backend="reference")
    tokens = []
    for t in range(length):
        token = {name: values[:, t] for name, values in inputs.items()}
        leading = (token.pop(name) for name in ("x", "beta_logit", "k", "q"))
        y = longhorn_scan_of_token(*leading, state, **token, **options, backend="triton")
        assert y.dtype == dtype
        tokens.append(y)
    assert_agree({"y": torch.stack(tokens, 1), "state": state}, {"y": want, "state": final}, BOUNDS[dtype])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_step_of_the_convolution_agrees_with_reference(dtype, width):
    batch, length, channels = 2, 4, 130
    x = random(batch, length, channels + 3, seed=1).to(dtype)[..., :channels]  # rows that lie apart
    weight, bias = random(channels, width, seed=2).to(dtype), random(channels, seed=3).to(dtype)
    state = random(batch, width - 1, channels, seed=4).to(dtype)
    exact = (t.double() for t in (x, weight, bias))
    options = {"activation": "silu", "initial_state": state.double(), "return_final_state": True}
    want, final = causal_conv(*exact, **options, backend="reference")
    options = {"activation": "silu", "backend": "triton"}
    tokens = [causal_conv_of_token(x[:, t], state, weight, bias, **options) for t in range(length)]
    bounds = {"y": torch.stack(tokens, 1), "state": state}, {"y": want, "state": final}, BOUNDS[dtype]
    assert_agree(*bounds)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_steps_on_pages(dtype):
    """The bits of a step on rows; no number of another page changes, nor any between the pages."""
    pages, sizes = torch.tensor([4, 0, 3], device=DEVICE), (random(21, seed=1), random(21, 4, seed=2))
    x, logit = random(3, 21, seed=3).to(dtype), random(3, 21, seed=4).to(dtype)
    k, q = random(3, 5, seed=5).to(dtype), random(3, 5, seed=6).to(dtype)
    steps = {
        (21, 5): lambda state, **given: longhorn_scan_of_token(
            x, logit, k, q, state, D=sizes[0], **given, backend="triton"
        ),
        (3, 21): lambda state, **given: causal_conv_of_token(x, state, sizes[1].to(dtype), **given, backend="triton"),
    }
    for shape, step in steps.items():
        memory = random(5, shape[0] * shape[1] + 3, seed=7).to(dtype)
        held = memory[:, 1 : 1 + shape[0] * shape[1]].unflatten(1, shape)
        rows, wanted = held[pages], memory.clone()
        y = step(rows)
        wanted[:, 1 : 1 + shape[0] * shape[1]].unflatten(1, shape)[pages] = rows
        assert torch.equal(step(held, pages=pages), y)
        assert torch.equal(memory, wanted)


CONVOLUTIONS = {
    "plain": {"shape": (2, 7, 5, 4), "optional": False, "activation": None},
    "silu": {"shape": (2, 7, 5, 4)},
    "one-tap": {"shape": (1, 6, 3, 1)},
    "shorter-than-taps": {"shape": (2, 2, 3, 4)},
    "many-tiles": {"shape": (1, 70, 66, 3)},
    "packed": {"shape": (2, 40, 3, 4), "packed": True},
    "padded": {"shape": (3, 6, 3, 4), "lengths": [6, 2, 0]},
    "packed-padded": {"shape": (2, 9, 3, 4), "packed": True, "lengths": [9, 5]},
    "bfloat16": {"shape": (2, 7, 5, 4), "dtype": torch.bfloat16},
    "float16": {"shape": (2, 7, 5, 4), "dtype": torch.float16},
}


@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_convolution_agrees_with_reference(case):
    case = {"dtype": torch.float32, "packed": False, "lengths": None, "optional": True, "activation": "silu"} | case
    batch, length, channels, width = case["shape"]
    inputs = {"x": random(batch, length, channels, seed=1), "weight": random(channels, width, seed=2)}
    if case["optional"]:
        inputs |= {"bias": random(channels, seed=3), "initial_state": random(batch, width - 1, channels, seed=4)}
    inputs = {name: t.to(case["dtype"]) for name, t in inputs.items()}
    options = {"activation": case["activation"], "seq_idx": documents(batch, length) if case["packed"] else None}
    if case["lengths"] is not None:
        options["lengths"] = torch.tensor(case["lengths"], device=DEVICE)
    got = gradients(causal_conv, inputs, None, backend="triton", **options)
    want = gradients(causal_conv, inputs, torch.float64, backend="reference", **options)
    assert all(t is None or t.isfinite().all() for t in got.values())
    assert_agree(got, want, BOUNDS[case["dtype"]])


LONG = {
    "causal": {"shape": (2, 70, 3), "taps": (3, 70)},
    "few-blocks": {"shape": (1, 20, 2), "taps": (2, 17)},
    "longer-filter": {"shape": (1, 33, 2), "taps": (2, 50), "state": True},
    "state": {"shape": (2, 40, 2), "taps": (2, 19), "state": True},
    "shared-filters": {"shape": (2, 35, 6), "taps": (2, 35)},
    "many-filters": {"shape": (2, 35, 4), "taps": (3, 4, 35)},
    "two-sided": {"shape": (3, 50, 2), "taps": (2, 50), "future": 49},
    "future-longer": {"shape": (1, 20, 2), "taps": (2, 18), "future": 40},
    "padded": {"shape": (3, 40, 2), "taps": (2, 40), "lengths": [40, 7, 0]},
    "packed": {"shape": (2, 40, 2), "taps": (2, 40), "packed": True},
    "bfloat16": {"shape": (2, 40, 2), "taps": (2, 40), "dtype": torch.bfloat16},
    "float16": {"shape": (2, 40, 2), "taps": (2, 40), "dtype": torch.float16},
}


@pytest.mark.parametrize("tile", [{"N": 16, "M": 16}, {"N": 32, "M": 16}], ids=["16", "32"])
@pytest.mark.parametrize("case", LONG.values(), ids=LONG.keys())
def test_long_convolution_agrees_with_reference(case, tile, monkeypatch):
    monkeypatch.setattr(long_launcher, "TILE", {**tile, "num_warps": 4})
    case = {"dtype": torch.float32, "future": 0, "state": False, "packed": False, "lengths": None} | case
    batch, length, channels = case["shape"]
    inputs = {"u": random(*case["shape"], seed=1), "kernel": random(*case["taps"], seed=2)}
    inputs["skip"] = random(*case["taps"][:-2], channels, seed=3)
    if case["future"]:
        inputs["future_kernel"] = random(*case["taps"][:-1], case["future"], seed=4)
    if case["state"]:
        inputs["initial_state"] = random(batch, case["taps"][-1] - 1, channels, seed=5)
    inputs["u"] = inputs["u"].to(case["dtype"])
    options = {"seq_idx": documents(batch, length) if case["packed"] else None}
    if case["lengths"] is not None:
        options["lengths"] = torch.tensor(case["lengths"], device=DEVICE)

    def measured(backend, dtype):
        leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in inputs.items()}
        y, _ = long_conv(**leaves, **options, backend=backend)
        loss = (y * random(*y.shape, seed=90).to(y.dtype)).sum()
        return {"y": y} | dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))

    assert_agree(measured("triton", None), measured("reference", torch.float64), BOUNDS[case["dtype"]])


def test_long_convolution_runs_the_kernel(monkeypatch):
    """And leaves to plain torch what it says it does."""
    u, kernel = random(1, 30, 2, seed=1), random(2, 30, seed=2)
    long_conv(u, kernel, backend="triton")  # which also checks the kernel, if nothing has before
    launched, toeplitz = [], long_launcher.toeplitz
    monkeypatch.setattr(long_launcher, "toeplitz", lambda *arguments: launched.append(1) or toeplitz(*arguments))
    long_conv(u, kernel, backend="triton")
    assert len(launched) == 1
    long_conv(u[:, :20], kernel[:, :20], seq_idx=documents(1, 20), backend="triton")
    long_conv(u[:, :20], kernel[:, :5], backend="triton")
    monkeypatch.setattr(long_launcher, "prefers_toeplitz", lambda *_, **__: False)
    long_conv(u, kernel, backend="triton")
    assert len(launched) == 1


def test_a_long_convolution_is_launched_along_one_axis(monkeypatch):
    """A card takes 2^31 - 1 programs along the first axis and 65,535 along the others; filters may be more."""
    recorder = Recorder(long_launcher.toeplitz_kernel)
    monkeypatch.setattr(long_launcher, "toeplitz_kernel", recorder)
    u, kernel = random(2, 30, 3, seed=1).requires_grad_(), random(3, 30, seed=2).requires_grad_()
    long_conv(u, kernel, backend="triton")[0].sum().backward()
    assert len(recorder.grids) == 3 and all(len(grid) == 1 for grid in recorder.grids)


def test_frozen_filters_get_no_gradient(monkeypatch):
    recorder = Recorder(long_launcher.toeplitz_kernel)
    monkeypatch.setattr(long_launcher, "toeplitz_kernel", recorder)
    u, kernel = random(2, 30, 3, seed=1).requires_grad_(), random(3, 30, seed=2)
    long_conv(u, kernel, backend="triton")[0].sum().backward()
    assert len(recorder.grids) == 2 and u.grad is not None


def test_ops_are_well_registered(monkeypatch):
    """Schema, fake implementation, autograd registration and AOT tracing of both ops."""
    inputs = {name: t.requires_grad_() for name, t in scan_inputs(1, 3, 2, 2, torch.float32).items()}
    inputs["state"] = inputs.pop("initial_state")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(launcher.scan, ScanInputs(**inputs, keeps=True), test_utils=checks)
    x, weight = (random(*shape, seed=1).requires_grad_() for shape in ((1, 3, 2), (2, 4)))
    torch.library.opcheck(conv_launcher.convolve, ConvInputs(x, weight, silu=True), test_utils=checks)
    rows, taps = (random(*shape, seed=1).requires_grad_() for shape in ((1, 2, 5), (4, 3)))
    torch.library.opcheck(long_launcher.toeplitz, (rows, taps, -1, 5), test_utils=checks)


def test_compiles_into_one_graph():
    def step(x, beta_logit, k, q, weight):
        x, _ = causal_conv(x, weight, activation="silu", backend="triton")
        y, _ = longhorn_scan(x, beta_logit, k, q, backend="triton")
        return y

    inputs = scan_inputs(1, 3, 2, 2, torch.float32, optional=False)
    arguments = [t.requires_grad_() for t in (*inputs.values(), random(2, 4, seed=7))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        got = torch.autograd.grad(compiled(*arguments).square().sum(), arguments)
        want = torch.autograd.grad(step(*arguments).square().sum(), arguments)
    torch.testing.assert_close(got, want)
