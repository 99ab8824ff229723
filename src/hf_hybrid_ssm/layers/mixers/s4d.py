"""S4D: a diagonal complex state space per channel (Gu et al., 2022)."""

import math
from typing import Any, ClassVar

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.hippo import legs_dplr
from hf_hybrid_ssm.layers.mixers.state_space import (
    SSM_FIELDS,
    StateSpaceMixer,
    complex_pairs,
    log_uniform_dt,
    twice_conjugate,
)
from hf_hybrid_ssm.ops.linear_scan import Transition

INITS = ("legs", "inv", "lin")


class DiagonalSSM(StateSpaceMixer):
    """The parameters that S4D and S4 have in common: eigenvalues, input, output, step size, skip.

    Only one of each conjugate pair is kept, so n = N / 2 complex numbers per system; `num_dynamics` = S copies of the
    eigenvalues and input vectors are tiled over the F D systems.

        A_log_real, A_imag (S, n)   Lambda = -exp(A_log_real) + i A_imag
        B (S, n, 2)                 C (directions F, D, n, 2)      log_dt (F, D)      D (F, D)
    """

    init_reads_values: ClassVar[bool] = False
    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "output", "none")
    output_parameters: ClassVar[tuple[str, ...]] = ("C", "D")
    config_options: ClassVar[dict[str, str]] = SSM_FIELDS | {"num_dynamics": "ssm_num_dynamics"}
    default_state_size: ClassVar[int] = 64
    conjugate_pairs: ClassVar[bool] = True
    A_log_real: nn.Parameter
    A_imag: nn.Parameter
    B: nn.Parameter
    C: nn.Parameter
    log_dt: nn.Parameter
    D: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = default_state_size,
        num_dynamics: int | None = None,
        dt_min: float = 1e-3,
        dt_max: float = 1e-1,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if not isinstance(state_size, int) or state_size < 2 or state_size % 2:
            raise ValueError(f"state_size must be even and at least 2 (conjugate pairs), got {state_size!r}.")
        systems = hidden_size * (self.num_filters or 1)
        if num_dynamics is not None and (num_dynamics < 1 or systems % num_dynamics):
            raise ValueError(f"num_dynamics must divide the {systems} systems, got {num_dynamics}.")
        self.state_size = state_size
        self.num_dynamics = num_dynamics or systems
        self.dt_min, self.dt_max = dt_min, dt_max

    def _common_parameters(self, eigenvalues: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        filters, channels, pairs = self.num_filters or 1, self.hidden_size, self.state_size // 2
        directions = 2 if self.bidirectional else 1
        copies = self.num_dynamics
        values = {
            "A_log_real": torch.log(-eigenvalues.real).expand(copies, pairs),
            "A_imag": eigenvalues.imag.expand(copies, pairs),
            "B": torch.view_as_real(b.resolve_conj()).expand(copies, pairs, 2),
            "C": torch.randn(directions * filters, channels, pairs, 2, dtype=torch.float64) * math.sqrt(0.5),
            "log_dt": log_uniform_dt((filters, channels), self.dt_min, self.dt_max),
            "D": torch.randn(filters, channels, dtype=torch.float64),
        }
        return {name: value.contiguous() for name, value in values.items()}

    def _tiled(self, value: torch.Tensor) -> torch.Tensor:
        """(S, n) -> (F, D, n): system f D + c takes copy (f D + c) mod S."""
        filters = self.num_filters or 1
        copies, pairs = value.shape
        if copies == 1:
            return value.expand(filters * self.hidden_size, pairs).view(filters, self.hidden_size, pairs)
        value = (
            value if copies == filters * self.hidden_size else value.repeat(filters * self.hidden_size // copies, 1)
        )
        return value.view(filters, self.hidden_size, pairs)

    def _eigenvalues(self, dtype: torch.dtype) -> torch.Tensor:
        return self._tiled(torch.complex(-torch.exp(self.A_log_real.to(dtype)), self.A_imag.to(dtype)))

    def _dt(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.exp(self.log_dt.to(dtype)).unsqueeze(-1)

    def output_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """2 Re(C s) as a row over the real and imaginary parts of s: (2 Re C, -2 Im C)."""
        c = self.C.to(dtype)
        readout = c * twice_conjugate(device=c.device)
        return readout.flatten(-2).view(-1, self.num_filters or 1, self.hidden_size, self.state_size)


class S4D(DiagonalSSM):
    r"""Diagonal S4: K_k = 2 Re sum_n C_n Bbar_n Abar_n^k.

    Discretisation "zoh" (the default; Abar = e^{dt A}, Bbar = (Abar - 1) / A B) or "bilinear". Initialisation "legs"
    (the normal part of HiPPO-LegS, Im B clipped to [-2, 2]), "inv" (A_n = -1/2 + i N / pi (N / (2n + 1) - 1), its
    asymptotic form) or "lin" (A_n = -1/2 + i pi n), both with B = 1.

    Further arguments: `DiagonalSSM` (state_size, num_dynamics, dt_min, dt_max), `StateSpaceMixer` (num_filters,
    block_size) and `Mixer` (bidirectional, trainable, learning_rate).
    """

    config_options: ClassVar[dict[str, str]] = DiagonalSSM.config_options | {
        "init": "ssm_init",
        "discretization": "ssm_discretization",
    }
    discretizations: ClassVar[tuple[str, ...]] = ("zoh", "bilinear")
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "log_dt")
    float32_parameters: ClassVar[tuple[str, ...]] = ("A_log_real", "A_imag", "B", "C", "log_dt", "D")

    def __init__(
        self,
        hidden_size: int,
        *,
        init: str = "legs",
        discretization: str | None = None,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if init not in INITS:
            raise ValueError(f"init={init!r} must be one of {', '.join(INITS)}.")
        if discretization not in (None, *self.discretizations):
            raise ValueError(f"discretization={discretization!r} must be one of {', '.join(self.discretizations)}.")
        self.init, self.discretization = init, discretization or self.discretizations[0]
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        if self.init == "legs":
            eigenvalues, b, _ = legs_dplr(self.state_size)
            return self._common_parameters(eigenvalues, torch.complex(b.real, b.imag.clamp(-2.0, 2.0)))
        order, size = torch.arange(self.state_size // 2, dtype=torch.float64), self.state_size
        frequencies = math.pi * order if self.init == "lin" else size / math.pi * (size / (2 * order + 1) - 1)
        eigenvalues = torch.complex(torch.full_like(order, -0.5), frequencies)
        return self._common_parameters(eigenvalues, torch.ones_like(eigenvalues))

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        dt, eigenvalues = self._dt(dtype), self._eigenvalues(dtype)
        b = self._tiled(complex_pairs(self.B, dtype))
        z = dt * eigenvalues
        if self.discretization == "zoh":
            growth = torch.expm1(z)  # the difference e^z - 1 loses the digits of a small step
            decay, input_scale = growth + 1, growth / eigenvalues
        else:
            decay, input_scale = (1 + z / 2) / (1 - z / 2), dt / (1 - z / 2)
        vector = torch.view_as_real(input_scale * b).flatten(-2)
        return Transition(torch.view_as_real(decay), "complex"), vector
