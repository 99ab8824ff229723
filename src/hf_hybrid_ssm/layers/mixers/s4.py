"""S4: HiPPO-LegS as diagonal plus low rank, discretised by the bilinear rule (Gu et al., 2021)."""

from typing import Any, ClassVar, NamedTuple

import torch

from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr
from hf_hybrid_ssm.layers.mixers.s4d import DiagonalSSM
from hf_hybrid_ssm.layers.mixers.state_space import complex_pairs
from hf_hybrid_ssm.ops.linear_scan import Transition


class _BilinearStep(NamedTuple):
    """The constants of one exact step of 5 n complex numbers instead of a dense N x N product."""

    resolvent: torch.Tensor  # 1 / (2 / dt - Lambda)
    expanded: torch.Tensor  # 2 / dt + Lambda
    p: torch.Tensor
    b: torch.Tensor
    correction: torch.Tensor  # 1 / (1 + 2 Re sum |P|^2 / (2 / dt - Lambda))

    def advance(self, state: torch.Tensor, u: torch.Tensor | float) -> torch.Tensor:
        """h' from h (..., F, D, N), real and imaginary parts side by side, and u (..., F, D, 1)."""
        h = torch.view_as_complex(state.unflatten(-1, (-1, 2)))
        low_rank = 2 * (self.p.conj() * h).real.sum(-1, keepdim=True)
        z = self.expanded * h - self.p * low_rank + 2 * self.b * u
        low_rank = 2 * (self.p.conj() * self.resolvent * z).real.sum(-1, keepdim=True)
        return torch.view_as_real(self.resolvent * (z - self.p * (self.correction * low_rank))).flatten(-2)


class S4(DiagonalSSM):
    r"""A = Lambda - P P^*, bilinear: Abar = (I - dt/2 A)^{-1} (I + dt/2 A), Bbar = (I - dt/2 A)^{-1} dt B.

    At its start this is HiPPO-LegS itself: A_ij = -sqrt((2i+1)(2j+1)) below the diagonal, -(i+1) on it, B_i =
    sqrt(2i+1), in the basis where A + P P^T is diagonal. It stays stable under training, since Re Lambda < 0 for all
    parameter values. The map is linear over the reals only, and its powers are taken as real N x N matrices.

    Parameters as in `DiagonalSSM`, and P (S, n, 2). Further arguments: `DiagonalSSM` (state_size,
    num_dynamics, dt_min, dt_max), `StateSpaceMixer` (filters, block_size, skip) and `Mixer` (bidirectional, trainable,
    learning_rate).
    """

    discretizations: ClassVar[tuple[str, ...]] = ("bilinear",)
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "P", "log_dt")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "P", "C", "log_dt", "D")

    def __init__(self, hidden_size: int, **options: Any):
        super().__init__(hidden_size, **options)
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        eigenvalues, b, p = legs_dplr(self.state_size)
        values = self._draw_common(eigenvalues, b)
        values["P"] = torch.view_as_real(p.resolve_conj()).expand(self.num_dynamics, -1, 2).contiguous()
        return values

    def _discretised(self, dtype: torch.dtype) -> _BilinearStep:
        eigenvalues, rate = self._eigenvalues(dtype), 2 / self._dt(dtype)
        p = self._tiled(complex_pairs(self.P, dtype))  # type: ignore[arg-type]
        b = self._tiled(complex_pairs(self.B, dtype))  # type: ignore[arg-type]
        resolvent = 1 / (rate - eigenvalues)
        norm = (p.conj() * p * resolvent).real.sum(-1, keepdim=True)
        return _BilinearStep(resolvent, rate + eigenvalues, p, b, 1 / (1 + 2 * norm))

    def transition(self, dtype: torch.dtype, direction: int = 0) -> Transition:
        basis = torch.eye(self.state_size, dtype=dtype, device=self._device)[:, None, None]  # (N, 1, 1, N)
        filters = self.filters or 1
        basis = basis.expand(-1, filters, self.hidden_size, -1).contiguous()
        columns = self._discretised(dtype).advance(basis, 0.0)  # row k: A e_k
        return Transition(columns.permute(1, 2, 0, 3).contiguous(), "dense")

    def input_vector(self, dtype: torch.dtype, direction: int = 0) -> torch.Tensor:
        zero = torch.zeros(self.filters or 1, self.hidden_size, self.state_size, dtype=dtype, device=self._device)
        return self._discretised(dtype).advance(zero, 1.0)

    def step_system(
        self, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        r"""With R = 1 / (2 / dt - Lambda) and c the correction, Abar h = R (2 / dt + Lambda) h - R P Re(k · h), where
        k = 8 c / dt R P^*: both products of rank one of `_BilinearStep.advance` read the same sum."""
        step = self._discretised(dtype)
        right = 4 * step.correction * (2 / self._dt(dtype)) * step.resolvent.conj() * step.p  # Re(k · h): of k^*
        parts = (step.resolvent * step.expanded, step.resolvent * step.p, right)
        decay, left, right = (torch.view_as_real(part.resolve_conj()).flatten(-2) for part in parts)
        return decay, self.input_vector(dtype), (left, right)
