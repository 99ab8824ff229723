"""Long convolution: every form computes the sum it stands for, and nothing passes between documents."""

from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.long_conv_costs import cheapest, fft_cost, toeplitz_cost
from hf_hybrid_ssm.ops.long_conv import torch_backend
from hf_hybrid_ssm.ops.long_conv.fft import fast_length
from hf_hybrid_ssm.ops.long_conv.thresholds import prefers_toeplitz
from tests.row_options import long_conv

# which of them runs is decided by these constants; only packed rows come in halves
FORMS = {
    "chosen": {},
    "direct": {"DIRECT": 10**6},
    "fft": {"DIRECT": 0, "PADDING": 10**6},
    "halves": {"DIRECT": 0, "PADDING": 0},
}


@contextmanager
def form(name: str):
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in FORMS[name].items():
            patch.setattr(torch_backend, constant, value)
        yield


def documents(batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, length, generator=generator) < 0.15).cumsum(1)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near(actual, wanted):
    torch.testing.assert_close(actual, wanted, atol=1e-11, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    length=st.sampled_from([0, 1, 2, 7, 8, 9, 16, 31, 45]),
    taps=st.sampled_from([1, 2, 3, 9, 17, 60]),
    future=st.sampled_from([None, 1, 5, 40]),
    name=st.sampled_from(sorted(FORMS)),
    packed=st.booleans(),
    ragged=st.booleans(),
    filters=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 99),
)
def test_forms_are_the_equation(length, taps, future, name, packed, ragged, filters, seed):
    batch, groups, channels = 2, 2, 4
    u = draw(batch, length, channels, seed=seed)
    heads = () if filters is None else (filters,)
    options = {"skip": draw(*heads, channels, seed=seed + 1)}
    kernel = draw(*heads, groups, taps, seed=seed + 2)
    if packed:
        options["seq_idx"] = documents(batch, length, seed)
    if ragged:
        options["lengths"] = torch.tensor([length // 2, length])
    if future is not None:
        options["future_kernel"] = draw(*heads, groups, future, seed=seed + 3)
    else:
        options["initial_state"] = draw(batch, taps - 1, channels, seed=seed + 4)
        options["return_final_state"] = True
    with form(name):
        y, state = long_conv(u, kernel, **options)
    wanted, wanted_state = long_conv(u, kernel, backend="reference", **options)
    assert y.shape == (batch, length, *heads, channels)
    assert_near(y, wanted)
    if future is None:
        assert_near(state, wanted_state)
    else:
        assert state is None
    if length:
        stride = 1 + seed % 9
        taken, _ = long_conv(u, kernel, stride=stride, **options)
        assert_near(taken, wanted[:, stride - 1 :: stride])
        positions = torch.randint(0, length, (batch, 3), generator=torch.Generator().manual_seed(seed))
        taken, _ = long_conv(u, kernel, positions=positions, **options)
        assert_near(taken, wanted[torch.arange(batch).unsqueeze(1), positions])


def test_halves_beyond_the_largest_matrix():
    """Lengths where the block form switches from matrices to FFTs, with kernels longer and shorter than a half."""
    u, seq_idx = draw(2, 700, 2), documents(2, 700, 3) // 4
    for taps in (20, 100, 700):
        kernel, future = draw(2, taps, seed=1), draw(2, taps, seed=2)
        y, _ = long_conv(u, kernel, future_kernel=future, seq_idx=seq_idx)
        for row in range(2):
            for document in seq_idx[row].unique():
                place = seq_idx[row] == document
                with form("direct"):
                    alone, _ = long_conv(u[row : row + 1, place], kernel, future_kernel=future)
                assert_near(y[row, place], alone[0])


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), packed=st.booleans())
def test_pieces(cuts, packed):
    u, kernel = draw(2, 40, 3), draw(3, 11, seed=1)
    seq_idx = documents(2, 40, 5) if packed else None
    wanted, final = long_conv(u, kernel, seq_idx=seq_idx, return_final_state=True)
    state, outputs, borders = None, [], [0, *sorted(cuts), 40]
    for begin, end in pairwise(borders):
        piece = None if seq_idx is None else seq_idx[:, begin:end]
        if packed and begin and begin < end:  # the history belongs to the first document of the piece
            goes_on = (seq_idx[:, begin] == seq_idx[:, begin - 1]).view(-1, 1, 1)
            state = torch.where(goes_on, state, 0.0)
        y, state = long_conv(u[:, begin:end], kernel, initial_state=state, seq_idx=piece, return_final_state=True)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), wanted)
    assert_near(state, final)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(name, packed):
    seq_idx = documents(2, 19, 1) if packed else None
    inputs = [draw(2, 19, 2), draw(2, 2, 30, seed=1), draw(2, 2, 12, seed=2), draw(2, 2, seed=3)]

    def two_sided(u, kernel, future, skip):
        return long_conv(u, kernel, future_kernel=future, skip=skip, seq_idx=seq_idx)[0]

    def causal(u, kernel, history, skip):
        return long_conv(u, kernel, initial_state=history, skip=skip, seq_idx=seq_idx, return_final_state=True)

    with form(name):
        assert torch.autograd.gradcheck(two_sided, [x.requires_grad_() for x in inputs], fast_mode=True)
        inputs[2] = draw(2, 29, 2, seed=2).requires_grad_()
        assert torch.autograd.gradcheck(causal, inputs, fast_mode=True)


@pytest.mark.parametrize("name", FORMS)
def test_causal_by_gradient(name):
    u = draw(1, 30, 1).requires_grad_()
    with form(name):
        y, _ = long_conv(u, draw(1, 30, seed=1), seq_idx=torch.zeros(1, 30, dtype=torch.int64))
    for t in (0, 7, 8, 20):
        (gradient,) = torch.autograd.grad(y[0, t, 0], u, retain_graph=True)
        assert gradient[0, t + 1 :].abs().max() < 1e-12
        assert (gradient[0, : t + 1].abs() > 1e-3).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (torch.float16, 1e-3)], ids=str
)
def test_low_precision(dtype, tolerance, packed):
    u, kernel = draw(2, 1000, 3).to(dtype), draw(3, 1000, seed=1).to(dtype)
    seq_idx = documents(2, 1000, 1) // 40 if packed else None
    y, _ = long_conv(u, kernel, seq_idx=seq_idx)
    wanted, _ = long_conv(u.double(), kernel.double(), seq_idx=seq_idx)
    assert y.dtype == dtype
    assert (y.double() - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("name", ["fft", "halves"])
def test_autocast_does_not_reach_inside(name):
    u, kernel = draw(1, 64, 3).float(), draw(3, 64, seed=1).float()
    options = {"seq_idx": torch.zeros(1, 64, dtype=torch.int64) if name == "halves" else None}
    with form(name), torch.autocast("cpu", torch.bfloat16):
        y, _ = long_conv(u, kernel, **options)
    with form(name):
        torch.testing.assert_close(y, long_conv(u, kernel, **options)[0], atol=0, rtol=0)


@pytest.mark.parametrize("minimum", [1, 2, 7, 11, 97, 1000, 8191, 16385])
def test_fast_lengths(minimum):
    def smooth(n: int) -> bool:
        for prime in (2, 3, 5):
            while n % prime == 0:
                n //= prime
        return n == 1

    assert fast_length(minimum) == next(n for n in range(minimum, 2 * minimum + 1) if smooth(n))


def test_the_form_is_that_of_least_cost():
    """Products win up to some length, longer where they need not keep float32; transforms win after it for good."""
    lengths = [2**k for k in range(6, 17)]
    for is_coarse, border in ((False, 1024), (True, 2048)):
        assert all(prefers_toeplitz(n, n, is_coarse=is_coarse) == (n <= border) for n in lengths)
        assert all(cheapest(n, n, is_coarse=is_coarse) == ("toeplitz" if n <= border else "fft") for n in lengths)
    assert not prefers_toeplitz(65536, 16) and prefers_toeplitz(65536, 9, 9)  # few taps reach few tiles
    assert not prefers_toeplitz(1024, 1024, 1023)  # as many again that look ahead
    for length, taps, coarse in product(lengths, (64, 700, 1536, 4096), (False, True)):
        chosen = toeplitz_cost if prefers_toeplitz(length, taps, is_coarse=coarse) else fft_cost
        least = toeplitz_cost if cheapest(length, taps, is_coarse=coarse) == "toeplitz" else fft_cost
        options = [{"is_coarse": coarse} if cost is toeplitz_cost else {} for cost in (chosen, least)]
        seconds = [cost(length, taps, **each).seconds() for cost, each in zip((chosen, least), options, strict=True)]
        assert seconds[0] <= 1.15 * seconds[1]  # one number for every length is near enough
    for length in lengths:
        assert fft_cost(length, length).bytes > toeplitz_cost(length, length).bytes


def test_documents_of_unequal_length_are_not_padded(monkeypatch):
    """Rows of one long document and many short ones go by halves; equal ones become rows of their own."""
    called = []
    block_conv = torch_backend.block_conv
    monkeypatch.setattr(torch_backend, "block_conv", lambda *args: called.append(1) or block_conv(*args))
    u, kernel = draw(1, 120, 2), draw(2, 40, seed=1)
    unequal = torch.tensor([[0] * 100 + list(range(1, 21))])
    for seq_idx, halves in ((torch.arange(120).unsqueeze(0) // 30, 0), (unequal, 1)):
        y, _ = long_conv(u, kernel, seq_idx=seq_idx)
        assert_near(y, long_conv(u, kernel, seq_idx=seq_idx, backend="reference")[0])
        assert len(called) == halves


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"u": torch.zeros(2, 5)}, ValueError, r"u must have shape \(B, L, D\)"),
        ({"u": torch.zeros(2, 5, 4, dtype=torch.int64)}, TypeError, "floating point"),
        ({"kernel": torch.zeros(3, 7)}, ValueError, "must divide the 4 channels"),
        ({"kernel": torch.zeros(4)}, ValueError, "kernel must be a tensor"),
        ({"kernel": torch.zeros(4, 0)}, ValueError, "at least one tap"),
        ({"future_kernel": torch.zeros(2, 4, 3)}, ValueError, "as many filters"),
        ({"skip": torch.zeros(3)}, ValueError, "skip"),
        ({"initial_state": torch.zeros(2, 7, 4)}, ValueError, "initial_state"),
        ({"future_kernel": torch.zeros(4, 3), "return_final_state": True}, ValueError, "causal"),
        ({"seq_idx": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, "seq_idx"),
        ({"lengths": torch.tensor([5, 9])}, ValueError, "lengths must lie in 0..5"),
        ({"lengths": torch.tensor([5.0, 1.0])}, TypeError, "lengths must be int"),
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"backend": "triton"}, ValueError, "cannot run long_conv"),
    ],
)
def test_bad_input(change, error, message):
    arguments = {"u": torch.zeros(2, 5, 4), "kernel": torch.zeros(4, 7), **change}
    with pytest.raises(error, match=message):
        long_conv(arguments.pop("u"), arguments.pop("kernel"), **arguments)
