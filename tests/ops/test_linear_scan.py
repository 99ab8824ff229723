"""Linear recurrences in block form compute the recurrence: any length, block, document, ragged row, piece."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid_ssm.ops.linear_scan import (
    BlockMatrices,
    ChannelSystem,
    Transition,
    block_outputs,
    block_states,
    long_kernel,
)
from tests.row_options import diagonal_scan, lti_scan

F, D, N = 2, 3, 4
FORMS = ("real", "complex", "dense")
LENGTHS = st.sampled_from([0, 1, 3, 4, 5, 8, 16, 17, 33, 45, 70])


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def documents(batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(batch, length, generator=generator) < 0.15).cumsum(1)


def transition(form: str, seed: int = 0) -> Transition:
    if form == "real":
        return Transition(torch.sigmoid(draw(F, D, N, seed=seed)), form)
    if form == "complex":
        radius, angle = torch.sigmoid(draw(F, D, N // 2, seed=seed)), 3 * draw(F, D, N // 2, seed=seed + 1)
        return Transition(torch.view_as_real(torch.polar(radius, angle)), form)
    return Transition(0.2 * draw(F, D, N, N, seed=seed), form)


def in_blocks(matrices: tuple, block: int) -> ChannelSystem:
    """The system A, B, C, to be scanned in blocks of this size."""
    blocks = BlockMatrices(lambda: block_states(*matrices, block), lambda: block_outputs(*matrices, block))
    return ChannelSystem(*matrices, blocks=blocks)


def system(form: str, block: int, seed: int = 0) -> ChannelSystem:
    return in_blocks((transition(form, seed), draw(F, D, N, seed=seed + 2), draw(F, D, N, seed=seed + 3)), block)


def assert_near(actual, wanted):
    torch.testing.assert_close(actual, wanted, atol=1e-11, rtol=1e-9)


def matrix(step: Transition) -> torch.Tensor:
    """A (F, D, N, N), written out."""
    if step.form == "dense":
        return step.value.mT
    if step.form == "real":
        return torch.diag_embed(step.value)
    a = torch.zeros(F, D, N, N, dtype=torch.float64)
    for n in range(N // 2):
        re, im = step.value[..., n, 0], step.value[..., n, 1]
        a[..., 2 * n, 2 * n], a[..., 2 * n, 2 * n + 1] = re, -im
        a[..., 2 * n + 1, 2 * n], a[..., 2 * n + 1, 2 * n + 1] = im, re
    return a


@pytest.mark.parametrize("form", FORMS)
def test_transitions_are_matrices(form):
    step = transition(form)
    a, rows = matrix(step), draw(F, D, 5, N, seed=9)
    assert_near(step.apply(rows), torch.einsum("fdij,fdmj->fdmi", a, rows))
    assert_near(step.apply(rows, transposed=True), torch.einsum("fdji,fdmj->fdmi", a, rows))
    powers = step.powers_of_two(4) if form == "dense" else [step.power(exponent) for exponent in (1, 2, 4)]
    for power, wanted in zip(powers, (a, a @ a, a @ a @ a @ a), strict=True):
        assert_near(matrix(power), wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_orbits_are_powers_times_vectors(form, transposed):
    a, vectors = matrix(transition(form)), draw(F, D, N, seed=9)
    a = a.mT if transposed else a
    options = {} if form == "dense" else {"start": 2, "step": 3}
    if form == "dense":
        powers = transition(form).krylov_by_doubling(vectors.unsqueeze(-2), 4, transposed=transposed)[0]
    else:
        powers = transition(form).krylov(vectors, 4, transposed=transposed, **options)
    for j in range(4):
        power = torch.linalg.matrix_power(a, options.get("start", 0) + j * options.get("step", 1))
        assert_near(powers[:, :, j], (power @ vectors.unsqueeze(-1)).squeeze(-1))


def test_powers_of_zero():
    """What underflows is 0, and the gradient of its first power is 1."""
    zero = torch.zeros(F, D, N // 2, 2, dtype=torch.float64).requires_grad_()
    powers = Transition(zero, "complex").krylov(torch.ones(F, D, N, dtype=torch.float64), 3)
    assert_near(powers[:, :, 0], torch.ones(F, D, N, dtype=torch.float64))
    assert powers[:, :, 1:].abs().max() < 1e-140
    (gradient,) = torch.autograd.grad(powers.sum(), zero)
    assert_near(gradient, torch.tensor([2.0, 0.0], dtype=torch.float64).expand_as(zero))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [1, 2, 8])
def test_block_matrices(form, block):
    system_ = system(form, block)
    s, inside, first = system_.blocks.states(), system_.blocks.outputs(), system_.vector
    a = matrix(transition(form))
    for j in range(block):
        power = torch.linalg.matrix_power(a, j)
        vector = (power @ first.unsqueeze(-1)).squeeze(-1)
        assert_near(s.input_to_state[:, block - 1 - j].unflatten(-1, (F, N)).transpose(0, 1), vector)
        assert_near(inside.kernel[..., j], (s.output * vector).sum(-1))
        assert_near(inside.state_to_output[:, :, j], (s.output.unsqueeze(-2) @ power @ a).squeeze(-2))
    for length in (1, block, 3 * block + 1, 40):
        kernel = long_kernel(*system_[:3], length)
        assert kernel.shape == (F, D, length)
        vector = torch.linalg.matrix_power(a, length - 1) @ first.unsqueeze(-1)
        assert_near(kernel[..., -1], (s.output * vector.squeeze(-1)).sum(-1))


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    block=st.sampled_from([1, 4, 16]),
    length=LENGTHS,
    packed=st.booleans(),
    ragged=st.booleans(),
    stride=st.sampled_from([None, 3, 4, 32]),
    seed=st.integers(0, 99),
)
def test_lti_scan_is_the_recurrence(form, block, length, packed, ragged, stride, seed):
    batch = 3
    u = draw(batch, length, D, seed=seed)
    options = {
        "skip": draw(F, D, seed=seed + 1),
        "initial_state": draw(batch, F, D, N, seed=seed + 2),
        "seq_idx": documents(batch, length, seed) if packed else None,
        "lengths": torch.tensor([0, length, (length * seed) // 99]) if ragged else None,
        "return_final_state": True,
        "stride": stride,
    }
    s = system(form, block, seed)
    y, state = lti_scan(u, s, **options)
    wanted, wanted_state = lti_scan(u, s, backend="reference", **options)
    assert_near(state, wanted_state)
    if not ragged:
        assert_near(y, wanted)
        return
    for row, real in enumerate(options["lengths"].tolist()):
        real = real if stride is None else real // stride
        assert_near(y[row, :real], wanted[row, :real])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [1, 4, 16])
def test_outputs_at_some_tokens(form, block):
    positions = torch.randint(0, 37, (3, 6), generator=torch.Generator().manual_seed(block))
    u, s = draw(3, 37, D), system(form, block)
    options = {"initial_state": draw(3, F, D, N, seed=2), "skip": draw(F, D, seed=1), "seq_idx": documents(3, 37, 5)}
    for backend in ("torch", "reference"):
        taken, _ = lti_scan(u, s, positions=positions, backend=backend, **options)
        assert_near(taken, lti_scan(u, s, backend="reference", **options)[0][torch.arange(3).unsqueeze(1), positions])


@pytest.mark.parametrize("form", FORMS)
def test_lti_scan_gradcheck(form):
    u, start = draw(2, 11, D).requires_grad_(), draw(2, F, D, N, seed=1).requires_grad_()
    value = transition(form).value.requires_grad_()
    b, c, skip = (draw(*shape, seed=7).requires_grad_() for shape in ((F, D, N), (F, D, N), (F, D)))

    def run(u, start, value, b, c, skip):
        s = in_blocks((Transition(value, form), b, c), 4)
        return lti_scan(u, s, skip=skip, initial_state=start, seq_idx=documents(2, 11, 3), return_final_state=True)

    assert torch.autograd.gradcheck(run, (u, start, value, b, c, skip), fast_mode=True)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.complex128]),
    length=st.sampled_from([0, 1, 5, 31, 32, 33, 64, 100]),
    packed=st.booleans(),
    ragged=st.booleans(),
    seed=st.integers(0, 99),
)
def test_diagonal_scan_is_the_recurrence(dtype, length, packed, ragged, seed):
    batch, size = 3, 5
    decay = torch.sigmoid(draw(size, seed=seed)).to(dtype)
    if dtype.is_complex:
        decay = decay * torch.exp(1j * draw(size, seed=seed + 1))
    options = {
        "initial_state": draw(batch, size, seed=seed + 2, dtype=dtype),
        "seq_idx": documents(batch, length, seed) if packed else None,
        "lengths": torch.tensor([0, length, length // 2]) if ragged else None,
        "return_final_state": True,
    }
    x = draw(batch, length, size, seed=seed + 3, dtype=dtype)
    h, state = diagonal_scan(decay, x, **options)
    wanted, wanted_state = diagonal_scan(decay, x, backend="reference", **options)
    assert_near(h, wanted)
    assert_near(state, wanted_state)
    if ragged:
        assert torch.equal(state[0], options["initial_state"][0])


@pytest.mark.parametrize("form", FORMS)
def test_float32_over_a_long_row(form):
    s = system(form, 64)
    # as layers do: powers taken in float64, then rounded; the kernels take the decay as it is
    coarse = s.transition if form != "dense" else s.transition.to(torch.float32)
    blocks = BlockMatrices(lambda: s.blocks.states().to(torch.float32), lambda: s.blocks.outputs().to(torch.float32))
    single = ChannelSystem(coarse, s.vector.float(), s.output.float(), blocks)
    u = draw(1, 5000, D).float()
    y, state = lti_scan(u, single, return_final_state=True)
    wanted, wanted_state = lti_scan(u.double(), s, return_final_state=True)
    assert y.dtype == state.dtype == torch.float32
    assert (y - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert (state - wanted_state).abs().max() < 1e-5 * wanted_state.abs().max()
    half, _ = lti_scan(u.bfloat16(), single)
    assert half.dtype == torch.bfloat16
    assert (half - wanted).abs().max() < 2e-2 * wanted.abs().max()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"u": torch.zeros(2, 5, D + 1)}, ValueError, "u must have shape"),
        ({"initial_state": torch.zeros(2, F, D, N + 1)}, ValueError, "initial_state"),
        ({"skip": torch.zeros(D)}, ValueError, "skip"),
        ({"seq_idx": torch.tensor([[1, 0, 0, 0, 0]] * 2)}, ValueError, "seq_idx must not decrease"),
        ({"lengths": torch.tensor([-1, 2])}, ValueError, "lengths must lie in 0..L"),
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"backend": "triton"}, ValueError, "cannot run lti_scan"),
    ],
)
def test_bad_lti_scan(change, error, message):
    arguments = {"u": torch.zeros(2, 5, D), **change}
    with pytest.raises(error, match=message):
        lti_scan(arguments.pop("u"), system("real", 4), **arguments)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.zeros(2, 5)}, ValueError, "x must have shape"),
        ({"x": torch.zeros(2, 5, 3, dtype=torch.bfloat16)}, TypeError, "float32, float64"),
        ({"decay": torch.zeros(4)}, ValueError, "decay"),
        ({"decay": torch.zeros(3, dtype=torch.complex64)}, TypeError, "decay"),
        ({"initial_state": torch.zeros(3)}, ValueError, "initial_state"),
        ({"seq_idx": torch.zeros(2, 5)}, TypeError, "seq_idx must be int"),
    ],
)
def test_bad_diagonal_scan(change, error, message):
    arguments = {"decay": torch.zeros(3), "x": torch.zeros(2, 5, 3), **change}
    with pytest.raises(error, match=message):
        diagonal_scan(arguments.pop("decay"), arguments.pop("x"), **arguments)


def test_blocks_are_powers_of_two():
    with pytest.raises(ValueError, match="power of two"):
        system("real", 12).blocks.states()


@pytest.mark.parametrize("form", FORMS)
def test_outputs_at_borders_of_blocks_need_the_states_alone(form):
    """Of 32 filters in each layer, as BST's MF has, the rest would be two thirds of the first forward's work."""
    s, u = system(form, 4), draw(2, 12, D, seed=8)
    wanted, final = lti_scan(u, s, stride=4, return_final_state=True)
    alone = s._replace(blocks=BlockMatrices(s.blocks.states, lambda: pytest.fail("outputs inside of blocks")))
    y, state = lti_scan(u, alone, stride=4, return_final_state=True, backend="torch")
    assert_near(y, wanted)
    assert_near(state, final)
