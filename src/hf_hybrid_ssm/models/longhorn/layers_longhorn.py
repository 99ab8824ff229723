"""The feed-forward layer of Longhorn, and the short convolution before its recurrence."""

import torch
import torch.nn.functional as F
from torch import nn

from hf_hybrid_ssm.ops.causal_conv import causal_conv


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases; (B, L, hidden_size) → (B, L, hidden_size)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of width K followed by SiLU; parameters `weight` (D, 1, K) and `bias` (D,).

    Tokens are (B, L, D) here, unlike in `nn.Conv1d`.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(self, x: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        """`options` (initial_state, seq_idx, lengths, return_final_state) as of `hf_hybrid_ssm.ops.causal_conv`."""
        return causal_conv(x, self.weight.squeeze(1), self.bias, activation="silu", **options)
