"""HiPPO-LegS, the matrices that make a linear state remember Legendre coefficients of the past. All in float64."""

import torch


def legs(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A (N, N), B (N,), P (N,): A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it; A + P P^T is normal."""
    index = torch.arange(size, dtype=torch.float64)
    b = torch.sqrt(2 * index + 1)
    a = -torch.tril(torch.outer(b, b), diagonal=-1) - torch.diag(index + 1)
    return a, b, torch.sqrt(index + 0.5)


def legs_dplr(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LegS in the basis where A = diag(Lambda) - P P^*: Lambda, B, P, complex (N / 2,), one of each conjugate pair.

    A + P P^T = -I/2 + S with S skew, so -i S is Hermitian and its eigenbasis is unitary. (A itself must not be
    diagonalised: the condition number of its eigenvectors is 1e25 at N = 64.)
    """
    if size < 2 or size % 2:
        raise ValueError(f"state_size must be even and at least 2 (conjugate pairs), got {size}.")
    a, b, p = legs(size)
    skew = a + torch.outer(p, p) + 0.5 * torch.eye(size, dtype=torch.float64)
    frequencies, basis = torch.linalg.eigh(-1j * skew)
    half = basis[:, : size // 2]  # ascending: the first half has the negative frequencies
    eigenvalues = torch.complex(torch.full((size // 2,), -0.5, dtype=torch.float64), frequencies[: size // 2])
    return eigenvalues, half.mH @ b.to(half.dtype), half.mH @ p.to(half.dtype)
