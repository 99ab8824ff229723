"""The multi-dimensional damped exponential moving average of MEGA (Ma et al., 2022)."""

import math
from typing import Any, ClassVar

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.state_space import StateSpaceMixer
from hf_hybrid_ssm.ops.linear_scan import Transition


class EMA(StateSpaceMixer):
    r"""h_t = (1 - p a) h_{t-1} + p beta u_t, y_t = silu(sum_n gamma_n h_{t,n} / sqrt(n) + omega u_t).

    p = sigmoid(delta), a = sigmoid(alpha), n = `state_size` averages per channel, all real. Parameters `delta`,
    `alpha`, `beta`, `gamma` (directions, D, n), `omega` (D,). The bidirectional form has parameters of its own for the
    direction ahead, and both directions include the token itself.

    Args:
        state_size: n.
    """

    init_reads_values: ClassVar[bool] = False
    ahead_includes_token: ClassVar[bool] = True
    supports_filters: ClassVar[bool] = False
    config_options: ClassVar[dict[str, str]] = {"state_size": "ssm_state_size"}
    default_state_size: ClassVar[int] = 16
    applies_silu: ClassVar[bool] = True
    trainable_choices: ClassVar[tuple[str, ...]] = ("all", "output", "none")
    dynamics_parameters: ClassVar[tuple[str, ...]] = ("delta", "alpha", "beta")
    output_parameters: ClassVar[tuple[str, ...]] = ("gamma", "omega")
    float32_parameters: ClassVar[tuple[str, ...]] = ("delta", "alpha", "beta", "gamma", "omega")
    delta: nn.Parameter
    alpha: nn.Parameter
    beta: nn.Parameter
    gamma: nn.Parameter
    omega: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = default_state_size,
        **options: Any,
    ):
        super().__init__(hidden_size, **options)
        if state_size < 1:
            raise ValueError(f"state_size must be at least 1, got {state_size}.")
        self.state_size = state_size
        self.create_parameters()

    def init_parameters(self) -> dict[str, torch.Tensor]:
        shape = (2 if self.bidirectional else 1, self.hidden_size, self.state_size)

        def normal(std: float, *sizes: int) -> torch.Tensor:
            return std * torch.randn(sizes, dtype=torch.float64)

        sign = 1.0 - 2.0 * (torch.arange(self.state_size, dtype=torch.float64) % 2)
        values = {
            "delta": normal(0.2, *shape),
            "alpha": normal(0.2, *shape),
            "beta": sign + normal(0.02, *shape),
            "gamma": normal(1.0, *shape),
            "omega": normal(1.0, self.hidden_size),
        }
        return values

    def dynamics(self, dtype: torch.dtype, direction: int = 0) -> tuple[Transition, torch.Tensor]:
        p = torch.sigmoid(self.delta[direction].to(dtype)).unsqueeze(0)
        decay = 1 - p * torch.sigmoid(self.alpha[direction].to(dtype))
        return Transition(decay, "real"), p * self.beta[direction].to(dtype)

    def output_rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self.gamma.to(dtype).unsqueeze(1) / math.sqrt(self.state_size)

    def skip_weight(self, dtype: torch.dtype) -> torch.Tensor:
        return self.omega.to(dtype).unsqueeze(0)
