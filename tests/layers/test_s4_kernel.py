"""S4's kernel against evaluations of the paper's real matrices, in many digits and step by step."""

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.hippo import hippo_legs, legs_dplr, legs_dplr_basis
from hf_hybrid_ssm.layers.mixers.s4 import S4

LENGTH = 16384
STEPS = (1e-3, 1e-1)


def s4(state_size: int) -> tuple[S4, torch.Tensor]:
    """Two channels with the smallest and the largest step of the paper, and their C for the real LegS system."""
    torch.manual_seed(state_size)
    mixer = S4(2, state_size=state_size, trainable="none", dtype=torch.float64)
    with torch.no_grad():
        mixer.log_dt.copy_(torch.tensor(STEPS, dtype=torch.float64).log())
    _, basis = legs_dplr_basis(state_size)
    return mixer, 2 * (torch.view_as_complex(mixer.C[0]) @ basis.mH).real


@pytest.mark.parametrize("state_size", [2, 16, 64])
def test_kernel_is_the_recurrence_of_the_real_matrices(state_size):
    """All 16384 taps, by applying Abar = (I - dt/2 A)^-1 (I + dt/2 A) once per tap in float64."""
    mixer, c = s4(state_size)
    a, b, _ = hippo_legs(state_size)
    eye = torch.eye(state_size, dtype=torch.float64)
    dt = torch.tensor(STEPS, dtype=torch.float64).view(2, 1, 1)
    bar = torch.linalg.solve_triangular(eye - dt / 2 * a, eye + dt / 2 * a, upper=False)
    state = torch.linalg.solve_triangular(eye - dt / 2 * a, dt * b.unsqueeze(-1), upper=False)
    states = torch.empty(LENGTH, 2, state_size, dtype=torch.float64)
    for k in range(LENGTH):
        states[k] = state.squeeze(-1)
        state = bar @ state
    wanted = (states * c).sum(-1).T
    assert wanted.abs().max() > 1e-2
    kernel = mixer.kernel(LENGTH, torch.float64)[0]
    assert (kernel - wanted).abs().max() < 1e-10 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("state_size", [2, 16, 64, 128])
def test_legs_is_normal_plus_low_rank(state_size):
    a, b, p = hippo_legs(state_size)
    rest = a + torch.outer(p, p) + 0.5 * torch.eye(state_size, dtype=torch.float64)
    assert (rest + rest.T).abs().max() < 1e-12 * state_size
    eigenvalues, half_b, half_p = legs_dplr(state_size)
    basis = legs_dplr_basis(state_size)[1]
    assert (eigenvalues.real == -0.5).all() and (eigenvalues.imag < 0).all()
    diagonal = torch.diag(eigenvalues) - torch.outer(half_p, half_p.conj())
    low = torch.outer(half_p, half_p)  # from the conjugate half
    rebuilt = 2 * (basis @ (diagonal @ basis.mH - low @ basis.mT)).real
    assert (rebuilt - a).abs().max() < 1e-10 * state_size
    assert (2 * (basis @ half_b).real - b).abs().max() < 1e-12 * state_size


def test_float32_kernel_and_reach():
    """Share of the energy within 128 / 512 / 2048 lags as published for N = 64; float32 storage costs 1e-6."""
    torch.manual_seed(0)
    mixer = S4(256, state_size=64, trainable="none")
    exact = mixer.kernel(LENGTH, torch.float64)[0]
    stored = mixer.kernel(LENGTH, torch.float32)[0]
    assert (stored - exact).norm() / exact.norm() < 1e-6
    share = exact.square().cumsum(-1) / exact.square().sum(-1, keepdim=True)
    for lags, wanted, tolerance in ((128, 0.84, 0.04), (512, 0.966, 0.015), (2048, 0.999, 0.002)):
        assert abs(float(share[:, lags - 1].mean()) - wanted) < tolerance
