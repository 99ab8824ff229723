"""The short causal convolution in front of a recurrence, as a module."""

import torch
from torch import nn

from hf_hybrid_ssm.ops.causal_conv import causal_conv


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of width K followed by SiLU; parameters `weight` (D, 1, K) and `bias` (D,).

    Tokens are (B, L, D) here, unlike in `nn.Conv1d`.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(self, x: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        """`options` (initial_state, seq_idx, lengths, return_final_state) as of `hf_hybrid_ssm.ops.causal_conv`."""
        return causal_conv(x, self.weight.squeeze(1), self.bias, activation="silu", **options)
