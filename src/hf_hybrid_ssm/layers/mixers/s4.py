"""S4: HiPPO-LegS as diagonal plus low rank, discretised by the bilinear rule (Gu et al., 2021)."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr
from hf_hybrid_ssm.layers.mixers.s4d import DiagonalSSM
from hf_hybrid_ssm.layers.mixers.state_space import complex_pairs
from hf_hybrid_ssm.ops.linear_scan import Transition


class _BilinearStep(NamedTuple):
    """The constants of one exact step, 5 n complex numbers instead of a dense N x N matrix."""

    resolvent: torch.Tensor  # 1 / (2 / dt - Lambda)
    expanded: torch.Tensor  # 2 / dt + Lambda
    p: torch.Tensor
    b: torch.Tensor
    correction: torch.Tensor  # 1 / (1 + 2 Re sum |P|^2 / (2 / dt - Lambda))


class S4(DiagonalSSM):
    r"""A = Lambda - P P^*, bilinear: Abar = (I - dt/2 A)^{-1} (I + dt/2 A), Bbar = (I - dt/2 A)^{-1} dt B.

    At its start this is HiPPO-LegS itself: A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it, B_i =
    sqrt(2i+1), in the basis where A + P P^T is diagonal. It stays stable under training, since Re Lambda < 0 for all
    parameter values. The map is linear over the reals only, and its powers are taken as real N x N matrices.

    Parameters as in `DiagonalSSM`, and P (S, n, 2). Further arguments: `DiagonalSSM` (state_size, num_dynamics,
    dt_min, dt_max), `StateSpaceMixer` (num_filters, block_size) and `Mixer` (bidirectional, trainable,
    learning_rate).
    """

    is_diagonal: ClassVar[bool] = False
    discretizations: ClassVar[tuple[str, ...]] = ("bilinear",)
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "P", "log_dt")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "P", "C", "log_dt", "D")

    P: nn.Parameter

    def __init__(self, hidden_size: int, **options: Any):
        super().__init__(hidden_size, **options)
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        eigenvalues, b, p = legs_dplr(self.state_size)
        values = self._common_parameters(eigenvalues, b)
        values["P"] = torch.view_as_real(p.resolve_conj()).expand(self.num_dynamics, -1, 2).contiguous()
        return values

    def _discretised(self, dtype: torch.dtype) -> _BilinearStep:
        eigenvalues, rate = self._eigenvalues(dtype), 2 / self._dt(dtype)
        p = self._tiled(complex_pairs(self.P, dtype))
        b = self._tiled(complex_pairs(self.B, dtype))
        resolvent = 1 / (rate - eigenvalues)
        norm = (p.conj() * p * resolvent).real.sum(-1, keepdim=True)
        return _BilinearStep(resolvent, rate + eigenvalues, p, b, 1 / (1 + 2 * norm))

    def _rank_one(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        r"""Decay, left, right and vector (F, D, n), complex, of h' = decay h - left Re(right · h) + vector u.

        With z = (2 / dt + Lambda) h - P 2 Re(P^* h) + 2 B u, R = 1 / (2 / dt - Lambda) and c the correction, a step is
        h' = R (z - c P 2 Re(P^* R z)). Both products of rank one read the same sum of h, so that
        Abar h = R (2 / dt + Lambda) h - R P Re(k h) with k = 8 c / dt R P^*.
        """
        step, rate = self._discretised(dtype), 2 / self._dt(dtype)
        left, decay = step.resolvent * step.p, step.resolvent * step.expanded
        right = 4 * step.correction * rate * (step.resolvent * step.p.conj())
        vector = 2 * step.resolvent * step.b - left * ((right * step.b).real.sum(-1, keepdim=True) / rate)
        return decay, left, right, vector

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        """Abar and Bbar, real and imaginary parts side by side."""
        decay, left, right, vector = self._rank_one(dtype)
        turned = torch.view_as_real(torch.stack([decay, 1j * decay], dim=-1))  # (F, D, n, 2, 2): of 1 and of i
        identity = torch.eye(self.state_size // 2, dtype=dtype, device=self._device)[:, None, :, None]
        diagonal = (turned.unsqueeze(-2) * identity).flatten(-2).flatten(-3, -2)  # (F, D, N, N), row k: of e_k
        read, written = (_side_by_side(part).unsqueeze(dim) for part, dim in ((right.conj(), -1), (left, -2)))
        return Transition(torch.addcmul(diagonal, read, written, value=-1), "dense"), _side_by_side(vector)

    def token_system(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        decay, left, right, vector = self._rank_one(dtype)
        low_rank = _side_by_side(left), _side_by_side(right.conj())  # Re(k h) of real parts
        return _side_by_side(decay), _side_by_side(vector), *low_rank


def _side_by_side(numbers: torch.Tensor) -> torch.Tensor:
    """(..., n) complex → (..., 2 n), real and imaginary parts next to each other."""
    return torch.view_as_real(numbers.resolve_conj()).flatten(-2)
