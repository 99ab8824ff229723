# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 29819b66770e95a821c69ee3ef5ba69ac1205bda1b16a4a9ccd33e1f5c244609

import torch
from torch import nn

from .causal_conv import causal_conv, causal_conv_step


# ---- models/longhorn/short_convolution.py ---------------------------------------------------------------------------
# The short causal convolution in front of a recurrence, as a module.

class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution of width K followed by SiLU; parameters `weight` (D, 1, K) and `bias` (D,).

    Tokens are (B, L, D) here, unlike in `nn.Conv1d`.
    """

    def __init__(self, channels: int, kernel_size: int, bias: bool = True):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=bias)

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, *, overwritten: torch.Tensor | None = None, **options
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`options` (initial_state, seq_idx, lengths, return_final_state) as of `hf_hybrid_ssm.ops.causal_conv`; for
        one token x (B, D) after earlier ones instead the state that the new one is to overwrite."""
        if overwritten is not None:
            y = causal_conv_step(x, overwritten, self.weight.squeeze(1), self.bias, activation="silu")
            return y, overwritten
        return causal_conv(x, self.weight.squeeze(1), self.bias, activation="silu", **options)
