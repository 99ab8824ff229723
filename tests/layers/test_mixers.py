"""Every long-range mixer computes its equation: at once, in pieces, token by token, packed, padded, in any dtype."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.registry import MIXERS, build_mixer
from tests.layers.mixer_cases import (
    BOTH_SIDES,
    CASES,
    DOCUMENTS,
    SELECTIVE,
    D,
    L,
    assert_near,
    assert_states,
    build,
    every_case,
    every_side,
    nonzero_state,
    of_rows,
    parts,
    shown_mixer_has_a_name,  # noqa: F401
    tokens,
)
from tests.layers.mixer_equations import equation
from tests.row_options import mix, one_token, unread_token

# -- the equation ---------------------------------------------------------------------------------------------------


@every_side
@pytest.mark.parametrize("length", [1, 8, L])
def test_forward_is_the_equation(case, bidirectional, length):
    mixer = build(case, bidirectional)
    u = tokens(2, length, D)
    y, state = mixer(u)
    assert state is None
    for row in range(2):
        assert_near(y[row], equation(mixer)(u[row]))


@every_case
@pytest.mark.parametrize("with_gradient", [True, False])
def test_steps_are_forward(case, with_gradient):
    mixer = build(case)
    u = tokens(2, L, D)
    for state in (mixer.init_state(2, dtype=torch.float64), nonzero_state(mixer, 2)):
        y, final = mix(mixer, u, initial_state=state, return_final_state=True)
        for t in range(L):
            with torch.set_grad_enabled(with_gradient):
                y_t, state = one_token(mixer, u[:, t], state)
            assert_near(y_t, y[:, t])
        assert_states(state, final)


@every_case
@settings(max_examples=6, deadline=None)
@given(cuts=st.lists(st.integers(0, L), max_size=3))
def test_pieces_are_forward(case, cuts):
    mixer = build(case)
    u = tokens(2, L, D)
    state = nonzero_state(mixer, 2)
    y, final = mix(mixer, u, initial_state=state, return_final_state=True)
    borders = [0, *sorted(cuts), L]
    outputs = []
    for begin, end in pairwise(borders):
        piece, state = mix(mixer, u[:, begin:end], initial_state=state, return_final_state=True)
        outputs.append(piece)
    assert_near(torch.cat(outputs, dim=1), y)
    assert_states(state, final)


@every_case
def test_fresh_state_is_the_default(case):
    mixer = build(case)
    u = tokens(2, L, D)
    y, final = mix(mixer, u, return_final_state=True)
    again, state = mix(mixer, u, initial_state=mixer.init_state(2, dtype=torch.float64), return_final_state=True)
    assert_near(again, y)
    assert_states(state, final)
    assert_near(mixer(u)[0], y)


@pytest.mark.parametrize("case", SELECTIVE)
@pytest.mark.parametrize("stride", [1, 5, 8, 16, 40])
def test_stride_takes_outputs_of_forward(case, stride):
    both = build(case, bidirectional=True)
    assert_near(both(tokens(2, L, D), stride=stride)[0], both(tokens(2, L, D))[0][:, stride - 1 :: stride])
    mixer = build(case)
    u, state = tokens(2, L, D), nonzero_state(mixer, 2)
    for rows in ({}, {"initial_state": state}, {"initial_state": state[1:].expand(3, *state.shape[1:])}):
        documents = DOCUMENTS if rows and rows["initial_state"].shape[0] == 3 else None
        x = u if documents is None else tokens(3, L, D)
        y, final = mix(mixer, x, seq_idx=documents, return_final_state=True, **rows)
        taken, state_after = mix(mixer, x, seq_idx=documents, return_final_state=True, stride=stride, **rows)
        assert_near(taken, y[:, stride - 1 :: stride])
        assert_states(state_after, final)


@pytest.mark.parametrize("case", SELECTIVE)
def test_positions_take_outputs_of_forward(case):
    """Any tokens of each row, also twice and in any order; across documents, states and padding."""
    positions = torch.tensor([[0, L - 1, 9, 9, 3], [L - 1, 0, 8, 17, 16], [7, 8, 9, 10, 11]])
    rows = torch.arange(3).unsqueeze(1)
    u = tokens(3, L, D)
    both = build(case, bidirectional=True)
    assert_near(both(u, positions=positions)[0], both(u)[0][rows, positions])
    mixer = build(case)
    state = nonzero_state(mixer, 3)
    for options in ({}, {"initial_state": state}, {"initial_state": state, "seq_idx": DOCUMENTS}):
        y, final = mix(mixer, u, return_final_state=True, **options)
        taken, state_after = mix(mixer, u, return_final_state=True, positions=positions, **options)
        assert_near(taken, y[rows, positions])
        assert_states(state_after, final)
    lengths = torch.tensor([10, L, 12])
    real = torch.tensor([[9, 0, 3], [L - 1, 4, 5], [11, 7, 8]])
    assert_near(mix(mixer, u, lengths=lengths, positions=real)[0], mix(mixer, u, lengths=lengths)[0][rows, real])
    with pytest.raises(ValueError, match="positions must lie in"):
        mixer(u, positions=positions + L)
    with pytest.raises(ValueError, match="give one"):
        mixer(u, positions=positions, stride=2)
    with pytest.raises(TypeError, match="int64"):
        mixer(u, positions=positions.float())


@torch.no_grad()
@pytest.mark.parametrize("case", SELECTIVE)
def test_a_token_that_nobody_reads(case):
    mixer = build(case)
    state = nonzero_state(mixer, 2)
    advanced = unread_token(mixer, tokens(2, D), copy.deepcopy(state))
    assert_states(advanced, one_token(mixer, tokens(2, D), state)[1])


# -- what may influence what ----------------------------------------------------------------------------------------


@every_side
def test_reach_by_gradient(case, bidirectional):
    mixer = build(case, bidirectional)
    u = tokens(1, L, D).requires_grad_()
    t = 17
    y, _ = mixer(u)
    (gradient,) = torch.autograd.grad(y[0, t].sum(), u)
    reach = gradient[0].abs().sum(-1)
    assert (reach[t - 5 : t + 1] > 1e-6).all()
    if bidirectional:
        assert (reach[t + 1 : t + 6] > 1e-6).all()
    else:
        assert reach[t + 1 :].max() < 1e-13


@every_side
@pytest.mark.parametrize("continued", [False, True])
def test_packed_documents_are_rows(case, bidirectional, continued):
    """A state belongs to the first document of its row."""
    mixer, u = build(case, bidirectional), tokens(3, L, D)
    state = nonzero_state(mixer, 3) if continued and not bidirectional else None
    y, final = mix(mixer, u, initial_state=state, seq_idx=DOCUMENTS, return_final_state=not bidirectional)
    for row in range(3):
        own = None if state is None else of_rows(state, slice(row, row + 1))
        for document in DOCUMENTS[row].unique():
            place = DOCUMENTS[row] == document
            alone, last = mix(mixer, u[row : row + 1, place], initial_state=own, return_final_state=not bidirectional)
            assert_near(y[row, place], alone[0])
            own = None
        if not bidirectional:
            assert_states(of_rows(final, slice(row, row + 1)), last)


@every_side
def test_documents_do_not_leak(case, bidirectional):
    """Not even what arithmetic cannot undo."""
    mixer = build(case, bidirectional)
    u = tokens(3, L, D)
    clean, _ = mix(mixer, u, seq_idx=DOCUMENTS)
    u[0, 3] = float("nan")
    u[2, 20] = 1e300
    y, _ = mix(mixer, u, seq_idx=DOCUMENTS)
    assert torch.equal(y[0, DOCUMENTS[0] != 1], clean[0, DOCUMENTS[0] != 1])
    assert torch.equal(y[1], clean[1])
    assert torch.equal(y[2, DOCUMENTS[2] != 6], clean[2, DOCUMENTS[2] != 6])


@every_side
@pytest.mark.parametrize("packed", [False, True])
def test_padded_rows_are_rows_alone(case, bidirectional, packed):
    mixer = build(case, bidirectional)
    lengths = torch.tensor([L, 0, 16, 21, 5])
    u = tokens(5, L, D)
    documents = torch.tensor([0] * 6 + [1] * 11 + [2] * 12).expand(5, L) if packed else None
    state = None if bidirectional else nonzero_state(mixer, 5)
    wanted = []
    for row, length in enumerate(lengths):
        kept = slice(row, row + 1)
        alone, final = mix(
            mixer,
            u[kept, :length],
            initial_state=None if state is None else of_rows(state, kept),
            seq_idx=None if documents is None else documents[kept, :length],
            return_final_state=not bidirectional,
        )
        wanted.append((alone, final))
        u[row, length:] = float("nan")
    y, final = mix(
        mixer, u, initial_state=state, seq_idx=documents, lengths=lengths, return_final_state=not bidirectional
    )
    assert y.isfinite().all()
    for row, (alone, last) in enumerate(wanted):
        assert_near(y[row, : lengths[row]], alone[0])
        if not bidirectional:
            assert_states(of_rows(final, slice(row, row + 1)), last)
    if state is not None:
        assert_states(of_rows(final, 1), of_rows(state, 1), atol=0, rtol=0)


# -- precision, devices, files --------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_low_precision_inputs(case, dtype, tolerance):
    mixer = build(case, dtype=torch.float32)
    exact = copy.deepcopy(mixer).double()
    u = tokens(2, 200, D, dtype=dtype)
    module = mixer.to(dtype) if case.startswith(("hyena", "lstm")) else mixer
    if module is mixer and case.startswith(("hyena", "lstm")):
        exact = copy.deepcopy(mixer).double()  # of the rounded projections
    with torch.no_grad():
        y, state = mix(module, u, return_final_state=True)
        wanted, _ = exact(u.double())
        y_t, state = one_token(module, u[:, 0], state)
    assert y.dtype == y_t.dtype == dtype
    assert all(part.dtype == torch.float32 for part in parts(state))
    scale = 8 if case.startswith(("hyena", "lstm")) else 1  # their own weights are in this dtype too
    error = (y.double() - wanted).abs().max() / wanted.abs().max()
    assert error < scale * tolerance


@every_case
def test_casting_keeps_the_recurrence(case):
    mixer = build(case, dtype=torch.float32)
    before = {name: value.clone() for name, value in mixer.state_dict().items()}
    mixer.to(torch.bfloat16).half()
    for module_name, module in mixer.named_modules():
        if isinstance(module, Mixer):
            for name in module.float32_parameters:
                if name in dict(module.named_parameters(recurse=False)):
                    full = f"{module_name}.{name}".lstrip(".")
                    assert torch.equal(mixer.state_dict()[full], before[full])
                    assert mixer.state_dict()[full].dtype == torch.float32
    mixer.double()
    assert all(value.dtype == torch.float64 for value in mixer.parameters())


@every_case
def test_parameters_are_defined_without_the_device(case):
    """Built on the meta device and filled afterwards = built at once; bfloat16 as default dtype does not round."""
    name, options = CASES[case]
    torch.manual_seed(3)
    wanted = build_mixer(name, D, **options)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            mixer = build_mixer(name, D, **options)
    finally:
        torch.set_default_dtype(previous)
    assert all(value.is_meta for value in mixer.parameters())
    shapes = {key: value.shape for key, value in wanted.named_parameters()}
    assert shapes == {key: value.shape for key, value in mixer.named_parameters()}
    for module in mixer.modules():
        if isinstance(module, Mixer):
            is_ours = type(module).__module__.startswith("hf_hybrid_ssm.")
            assert module.init_reads_values != is_ours  # sizes beyond memory are refused by their shapes alone
            own = {key: module.get_parameter(key) for key in module.initial_values()}
            assert own.keys() >= dict(module.named_parameters(recurse=False)).keys()
            for key in module.float32_parameters:
                assert key not in own or own[key].dtype == torch.float32
    mixer = mixer.to_empty(device="cpu").float()
    torch.manual_seed(5)
    mixer.reset_parameters()
    assert all(value.isfinite().all() for value in mixer.parameters())
    mixer.load_state_dict(wanted.state_dict())
    u = tokens(2, L, D, dtype=torch.float32)
    assert torch.equal(mixer(u)[0], wanted(u)[0])


def test_s5_outputs_start_with_variance_one_over_state_size():
    torch.manual_seed(0)
    mixer = build_mixer("s5", 256, state_size=64, blocks=1)
    # real and imaginary part of each entry have it, and the basis is unitary
    assert float(mixer.C.square().sum(-1).mean()) * 64 / 2 == pytest.approx(1, rel=0.05)


# -- bad input ------------------------------------------------------------------------------------------------------


def test_unknown_mixer_names_the_known_ones():
    with pytest.raises(ValueError, match="no mixer 's6'") as error:
        build_mixer("s6", D)
    assert all(name in str(error.value) for name in MIXERS)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("s4", {"hidden_size": 0}, "hidden_size"),
        ("s4", {"hidden_size": "8"}, "hidden_size must be a positive integer, got .8."),
        ("s4", {"state_size": 7}, "state_size must be even"),
        ("s4", {"block_size": 12}, "power of two"),
        ("s4", {"num_dynamics": 4}, "num_dynamics must divide"),
        ("s4", {"dt_min": 0.1, "dt_max": 0.01}, "dt_min"),
        ("s4", {"trainable": "some"}, "all, output, none"),
        ("s4", {"colour": 1}, "does not take"),
        ("s4d", {"init": "random"}, "legs, inv, lin"),
        ("s4d", {"discretization": "euler"}, "zoh, bilinear"),
        ("s4d", {"num_filters": 0}, "num_filters"),
        ("s5", {"state_size": 12, "blocks": 4}, "multiple of 2 blocks"),
        ("s5", {"num_filters": 0}, "num_filters"),
        ("hyena", {"num_filters": 2}, "num_filters must be None"),
        ("hyena", {"trainable": "output"}, "all, none"),
        ("unstructured", {"filter_emb": 4}, "odd"),
        ("unstructured", {"filter_length": 0}, "filter_length"),
        ("unstructured", {"fast_decay": 2.0}, "decay"),
        ("ema", {"state_size": 0}, "state_size"),
        ("ema", {"num_filters": 2}, "num_filters must be None"),
        ("lstm", {"hidden_size": 5, "bidirectional": True}, "even"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(name, options.pop("hidden_size", D), **options)


@every_case
def test_bad_arguments(case):
    mixer = build(case)
    u = tokens(2, 5, D)
    with pytest.raises(ValueError, match=r"u must have shape"):
        mixer(tokens(2, 5, D + 1))
    with pytest.raises(ValueError, match=r"seq_idx must not decrease"):
        mix(mixer, u, seq_idx=torch.tensor([[0, 1, 1, 0, 2]] * 2))
    with pytest.raises(TypeError, match=r"seq_idx must be int"):
        mix(mixer, u, seq_idx=torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"lengths must lie in 0..5"):
        mix(mixer, u, lengths=torch.tensor([6, 1]))
    with pytest.raises(ValueError, match=r"u must have shape"):
        one_token(mixer, u, mixer.init_state(2))
    wrong = mixer.init_state(3)
    with pytest.raises(ValueError, match=r"state"):
        mixer(u, initial_state=wrong)
    with pytest.raises(ValueError, match=r"state"):
        one_token(mixer, u[:, 0], wrong)
    if case in SELECTIVE:
        with pytest.raises(ValueError, match=r"stride must be at least 1"):
            mixer(u, stride=0)


@pytest.mark.parametrize("case", BOTH_SIDES)
def test_looking_both_ways_leaves_no_state(case):
    both, u = build(case, bidirectional=True), tokens(2, 5, D)
    with pytest.raises(ValueError, match=r"no state"):
        mix(both, u, return_final_state=True)
    with pytest.raises(ValueError, match=r"no state"):
        one_token(both, u[:, 0], build(case).init_state(2))


def test_looking_back_only_is_said():
    with pytest.raises(ValueError, match="bidirectional must be False"):
        build("shown", bidirectional=True)


@every_case
def test_empty_rows_and_batches(case):
    mixer = build(case)
    state = nonzero_state(mixer, 2)
    y, final = mix(mixer, tokens(2, 0, D), initial_state=state, return_final_state=True)
    assert y.shape[:2] == (2, 0)
    assert_states(final, state, atol=0, rtol=0)
    assert mixer(tokens(0, L, D))[0].shape[:2] == (0, L)
