"""The short causal convolution in torch, as K shifted products."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.causal_conv.reference import ConvInputs
from hf_hybrid_ssm.ops.core.padding import last_inputs
from hf_hybrid_ssm.ops.core.pages import gathers_pages


def causal_conv_torch(inputs: ConvInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv`."""
    x, weight, bias, initial_state, seq_idx, lengths, silu, _ = inputs
    width = weight.shape[1]
    # Both gradients of a sum of shifted products are again sums of shifted products; torch's depthwise convolution on
    # the CPU has a backward several times slower.
    seen = F.pad(x, (0, 0, width - 1, 0)) if initial_state is None else torch.cat([initial_state.to(x.dtype), x], 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = _shifted_products(seen.to(dtype), weight.to(dtype), _same_document(seq_idx, width))
    if bias is not None:
        y = y + bias.to(dtype)
    y = F.silu(y) if silu else y
    if seq_idx is None and lengths is None:
        return y.to(x.dtype), seen[:, x.shape[1] :]
    return y.to(x.dtype), last_inputs(x, width, initial_state, seq_idx, lengths)


def _same_document(seq_idx: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """(K, B, L): whether the token that tap j reads belongs to the reader's document."""
    if seq_idx is None:
        return None
    document = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)
    return document.unfold(1, seq_idx.shape[1], 1).transpose(0, 1) == seq_idx


def _shifted_products(seen: torch.Tensor, weight: torch.Tensor, same: torch.Tensor | None) -> torch.Tensor:
    width = weight.shape[1]
    length = seen.shape[1] - width + 1
    if length == 1 and same is None:  # a step of decoding: fewer, smaller calls
        return (seen * weight.t()).sum(1, keepdim=True)
    y: torch.Tensor | None = None
    for j in range(width):
        tap = seen[:, j : j + length]
        if same is not None and j < width - 1:
            tap = torch.where(same[j].unsqueeze(-1), tap, 0)
        y = tap * weight[:, j] if y is None else torch.addcmul(y, tap, weight[:, j])
    assert y is not None  # a convolution has a tap
    return y


@gathers_pages
def causal_conv_step_torch(inputs: ConvInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One token x (B, 1, D) after `state` (B, K - 1, D), which is overwritten."""
    x, weight, bias, state, _, _, silu, _ = inputs
    assert state is not None
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    seen = torch.cat([state, x.to(state.dtype)], 1)
    state.copy_(seen[:, 1:])
    y = torch.linalg.vecdot(seen.to(dtype), weight.to(dtype).t(), dim=1).unsqueeze(1)
    y = y if bias is None else y + bias
    return (F.silu(y) if silu else y).to(x.dtype), state
