"""The short causal convolution in torch, as K shifted products."""

import torch
import torch.nn.functional as F


def run(x, weight, bias=None, *, activation=None, initial_state=None, seq_idx=None, lengths=None):
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv`."""
    width = weight.shape[1]
    # Both gradients of a sum of shifted products are again sums of shifted products; torch's depthwise convolution on
    # the CPU has a backward several times slower.
    seen = F.pad(x, (0, 0, width - 1, 0)) if initial_state is None else torch.cat([initial_state.to(x.dtype), x], 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = _shifted_products(seen.to(dtype), weight.to(dtype), _same_document(seq_idx, width))
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = F.silu(y)
    return y.to(x.dtype), _last_inputs(seen, width, seq_idx, lengths)


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
    y = None
    for j in range(width):
        tap = seen[:, j : j + length]
        if same is not None and j < width - 1:
            tap = torch.where(same[j].unsqueeze(-1), tap, 0)
        y = tap * weight[:, j] if y is None else torch.addcmul(y, tap, weight[:, j])
    return y


def _last_inputs(seen, width, seq_idx, lengths) -> torch.Tensor:
    """The last K - 1 inputs of each row's last document, zero where that document is shorter; (B, K - 1, D)."""
    channels, length = seen.shape[2], seen.shape[1] - width + 1
    if lengths is None:
        state = seen[:, length:]
        if seq_idx is None:
            return state
        document = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)
        return torch.where((document[:, length:] == seq_idx[:, -1:]).unsqueeze(-1), state, 0)
    columns = lengths.unsqueeze(1) + torch.arange(width - 1, device=seen.device)
    state = seen.gather(1, columns.unsqueeze(-1).expand(-1, -1, channels))
    if seq_idx is None:
        return state
    document = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)
    last = document.gather(1, (lengths + width - 2).clamp(min=0).unsqueeze(1))
    return torch.where((document.gather(1, columns) == last).unsqueeze(-1), state, 0)
