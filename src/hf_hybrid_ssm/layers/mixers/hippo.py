"""HiPPO-LegS: matrices of a linear system whose state holds Legendre coefficients of the past, in float64."""

import torch


def hippo_legs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (N, N), B (N,), P (N,): A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it; A + P P^T is normal."""
    index = torch.arange(size, dtype=torch.float64)
    b = torch.sqrt(2 * index + 1)
    a = -torch.tril(torch.outer(b, b), diagonal=-1) - torch.diag(index + 1)
    return a, b, torch.sqrt(index + 0.5)


def legs_dplr_basis(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lambda (N / 2,) and eigenvectors V (N, N / 2) of A + P P^T of LegS, one of each conjugate pair.

    A + P P^T = -I/2 + S with S skew, so -i S is Hermitian and its eigenbasis is unitary. (A itself must not be
    diagonalised: the condition number of its eigenvectors is 8e10 at N = 16 already.)
    """
    if size < 2 or size % 2:
        raise ValueError(f"state_size must be even and at least 2 (conjugate pairs), got {size}.")
    a, _, p = hippo_legs(size)
    skew = a + torch.outer(p, p) + 0.5 * torch.eye(size, dtype=torch.float64)
    frequencies, basis = torch.linalg.eigh(-1j * skew)  # ascending: the first half is the negative frequencies
    half = slice(size // 2)
    real = torch.full((size // 2,), -0.5, dtype=torch.float64)
    return torch.complex(real, frequencies[half]), basis[:, half]


def legs_dplr(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LegS in the basis where A = diag(Lambda) - P P^*: Lambda, B, P, complex (N / 2,), one of each conjugate pair."""
    eigenvalues, basis = legs_dplr_basis(size)
    _, b, p = hippo_legs(size)
    return eigenvalues, basis.mH @ b.to(basis.dtype), basis.mH @ p.to(basis.dtype)
