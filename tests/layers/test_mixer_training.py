"""Every long-range mixer trains: gradients, frozen parameters, remembered kernels that are never stale, compiled."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.ops.core.rows import Rows
from tests.layers.mixer_cases import (
    CASES,
    FROZEN,
    D,
    L,
    assert_near,
    assert_states,
    build,
    every_side,
    nonzero_state,
    parts,
    shown_mixer_has_a_name,  # noqa: F401
    sides,
    tokens,
)
from tests.row_options import one_token
from tests.tiny_models import compiles


@every_side
def test_gradcheck(case, bidirectional):
    mixer = build(case, bidirectional)
    names = [name for name, value in mixer.named_parameters() if value.requires_grad]
    u = tokens(2, 11, D, seed=2).requires_grad_()
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 11])

    def run(u, *values):
        rows = Rows.of(seq_idx=documents, return_final_state=not bidirectional)
        y, state = torch.func.functional_call(mixer, dict(zip(names, values)), (u,), {"rows": rows})
        return (y, *(() if state is None else parts(state)))

    values = [mixer.get_parameter(name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(run, (u, *values), fast_mode=True, atol=1e-6)


@pytest.mark.parametrize("case", ["s4", "s4d-legs-zoh", "s4-output", "unstructured", "ema", "s5", "hyena"])
def test_gradients_of_fresh_rows_and_of_states(case):
    """The convolution of a fresh row and the block form of a continued one have the same gradients."""
    mixer = build(case)
    state = mixer.init_state(2, dtype=torch.float64)
    weights = tokens(2, L, D, seed=9)
    gradients = []
    for initial in (None, state):
        u = tokens(2, L, D).requires_grad_()
        mixer.zero_grad()
        y, _ = mixer(u, initial_state=initial)
        (y * weights).sum().backward()
        gradients.append([u.grad, *(p.grad for p in mixer.parameters() if p.grad is not None)])
    assert len(gradients[0]) > 1
    for a, b in zip(*gradients):
        assert_near(a, b)


@sides(FROZEN)
def test_frozen_means_constant(case, bidirectional):
    mixer = build(case, bidirectional)
    before = copy.deepcopy(mixer.state_dict())
    u = tokens(2, L, D).requires_grad_()
    y, _ = mixer(u)
    y.square().sum().backward()
    assert u.grad.abs().max() > 0
    assert all(value.grad is None and not value.requires_grad for value in mixer.parameters())
    name, options = CASES[case]
    trained = build_mixer(name, D, bidirectional=bidirectional, dtype=torch.float64, **{**options, "trainable": "all"})
    trained.load_state_dict(before)
    assert list(trained.state_dict()) == list(before)
    assert_near(trained(u)[0], y)


def test_a_frozen_kernel_is_computed_once_and_grows():
    mixer = build("s4-frozen")
    first = mixer.kernel(40, torch.float64)
    assert mixer.kernel(40, torch.float64).data_ptr() == first.data_ptr()
    assert mixer.kernel(20, torch.float64).data_ptr() == first.data_ptr()
    longer = mixer.kernel(100, torch.float64)
    assert_near(longer[..., :40], first)
    with torch.inference_mode():
        mixer.kernel(300, torch.float64)
    u = tokens(1, 250, D).requires_grad_()
    mixer(u)[0].sum().backward()  # a kernel made in inference mode serves autograd too
    assert not any("remembered" in name for name in mixer.state_dict())


def test_frozen_survives_loading_but_can_be_lifted():
    mixer = build("hyena-frozen")
    for module in mixer.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(value.detach().clone()))
    assert not any(value.requires_grad for value in mixer.parameters())
    mixer.requires_grad_(True)
    y, _ = mixer(tokens(1, L, D))
    y.sum().backward()
    assert all(value.grad is not None for value in mixer.parameters())


def test_output_mode_trains_what_reads_out():
    for name in ("s4", "s4d", "s5", "ema"):
        mixer = build_mixer(name, D, trainable="output")
        assert {n for n, p in mixer.named_parameters() if p.requires_grad} == set(type(mixer).output_parameters)


def test_recurrence_parameters_carry_their_optimizer_settings():
    mixer = build("s4", dtype=torch.float32)
    for survivor in (mixer, copy.deepcopy(mixer), mixer.double(), mixer.to_empty(device="cpu")):
        for name, _ in survivor.named_parameters():
            own_rate = {} if name in ("C", "D") else {"lr": 1e-3}
            assert survivor.optimizer_options(name) == {"weight_decay": 0.0} | own_rate
    assert build("s4d-frozen", learning_rate=None).optimizer_options("A_imag") == {"weight_decay": 0.0}


# -- torch.compile --------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize("case", ["s4-frozen", "s4", "s4d-legs-zoh", "unstructured", "ema", "s5", "hyena-frozen"])
def test_compiles_without_a_break_and_is_not_stale(case):
    torch._dynamo.reset()
    mixer = build(case, dtype=torch.float32)
    # the gradients of models with S4 are compiled in tests/matrix; tracing them takes as long as all other mixers here
    backend = "eager" if case.startswith("s4-") or case == "s4" else "aot_eager"
    run = torch.compile(mixer, backend=backend, fullgraph=True, dynamic=False)
    step = torch.compile(partial(one_token, mixer), backend=backend, fullgraph=True, dynamic=False)
    u = tokens(2, L, D, dtype=torch.float32)
    state = nonzero_state(build(case), 2)
    state = tuple(part.float() for part in parts(state))
    state = state if case.startswith("hyena") else state[0]
    other = build(case, dtype=torch.float32)
    other.reset_parameters()
    for _ in range(2):
        for options in ({}, {"initial_state": state, "rows": Rows(return_final_state=True)}):
            compiled = [run(u, **options) for _ in range(2)]
            wanted, final = mixer(u, **options)
            for y, after in compiled:
                torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)
                if final is not None:
                    assert_states(after, final, atol=1e-5, rtol=1e-5)
        y, after = step(u[:, 0], state)
        wanted, final = one_token(mixer, u[:, 0], state)
        torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)
        assert_states(after, final, atol=1e-5, rtol=1e-5)
        mixer.load_state_dict(other.state_dict())
