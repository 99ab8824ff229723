"""S4's kernel against evaluations of the paper's real matrices, in many digits and step by step."""

import mpmath
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


@pytest.mark.parametrize("state_size", [4, 16, 64])
def test_kernel_in_many_digits(state_size):
    """Some of 16384 taps from Abar^(2^j) in 40 digits, A lower triangular."""
    mixer, c = s4(state_size)
    kernel = mixer.kernel(LENGTH, torch.float64)[0]
    lags = (0, 1, 130, 1000, 5001, LENGTH - 1)
    size = state_size
    with mpmath.workdps(40):
        root = [mpmath.sqrt(2 * i + 1) for i in range(size)]
        for channel, dt in enumerate(STEPS):
            half = mpmath.exp(mpmath.mpf(float(mixer.log_dt[0, channel]))) / 2
            assert abs(2 * half - dt) < 1e-12
            a = [[-root[i] * root[j] if i > j else -mpmath.mpf(i + 1) for j in range(i + 1)] for i in range(size)]

            def solve(right, a=a, half=half):  # (I - dt/2 A) x = right, A lower triangular
                x = []
                for i in range(size):
                    total = right[i] + half * mpmath.fsum(a[i][j] * x[j] for j in range(i))
                    x.append(total / (1 - half * a[i][i]))
                return x

            columns = []
            for k in range(size):
                column = [(half * a[i][k] if k <= i else mpmath.mpf(0)) + (i == k) for i in range(size)]
                columns.append(solve(column))
            power = [[columns[k][i] for k in range(i + 1)] for i in range(size)]
            vectors = {lag: solve([2 * half * r for r in root]) for lag in lags}
            for bit in range(LENGTH.bit_length() - 1):
                for lag in lags:
                    if lag >> bit & 1:
                        v = vectors[lag]
                        vectors[lag] = [mpmath.fsum(power[i][k] * v[k] for k in range(i + 1)) for i in range(size)]
                power = [
                    [mpmath.fsum(power[i][m] * power[m][k] for m in range(k, i + 1)) for k in range(i + 1)]
                    for i in range(size)
                ]
            for lag, vector in vectors.items():
                exact = mpmath.fsum(mpmath.mpf(float(x)) * v for x, v in zip(c[channel], vector))
                assert abs(float(exact) - float(kernel[channel, lag])) < 1e-10


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


def test_published_eigenvalues():
    wanted = torch.tensor([-80.97, -25.63, -13.83, -8.36, -5.09, -2.90, -1.37, -0.352], dtype=torch.float64)
    torch.testing.assert_close(legs_dplr(16)[0].imag, wanted, atol=6e-3, rtol=0)


def test_the_discrete_system_is_a_contraction():
    """The real LegS form has a norm below 1 for every step: powers cannot blow up."""
    a, _, _ = hippo_legs(64)
    eye = torch.eye(64, dtype=torch.float64)
    for dt in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        bar = torch.linalg.solve(eye - dt / 2 * a, eye + dt / 2 * a)
        assert torch.linalg.matrix_norm(bar, ord=2) < 1


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
