"""The short causal convolution in front of a recurrence, as a module."""

import torch
from torch import nn

from hf_hybrid_ssm.ops.causal_conv import causal_conv


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of width K followed by SiLU; parameters `weight` (D, 1, K) and `bias` (D,).

    Tokens are (B, L, D) here, unlike in `nn.Conv1d`. See `hf_hybrid_ssm.ops.causal_conv` for the arguments.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        return_final_state: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return causal_conv(
            x,
            self.weight.squeeze(1),
            self.bias,
            activation="silu",
            initial_state=initial_state,
            seq_idx=seq_idx,
            lengths=lengths,
            return_final_state=return_final_state,
        )
