"""Attention of one token in torch: its key into its slot, a mask by distance, torch's fused attention."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.local_attention.distance_range import zero_key_logits


def attention_step_torch(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.attention_step.attention_step`."""
    dtype = q.dtype if q.dtype == torch.float64 or q.device.type != "cpu" else torch.float32
    output_dtype, (left, right) = q.dtype, window
    if head_scale is not None:
        factor = head_scale.abs().to(dtype).unsqueeze(1)
        q, k = _normalised(q, dtype) * factor, None if k is None else _normalised(k, dtype)
        bias = None if bias is None else bias * factor
    mask = sink = None
    used = [keys, values]
    if k is not None and block:
        slot = (seen % keys.shape[2]).unsqueeze(1)
        for held, new in ((keys, k), (values, v)):
            index = slot.view(-1, 1, 1, 1).expand(-1, held.shape[1], 1, held.shape[3])
            held.scatter_(2, index, new.to(held.dtype).unsqueeze(2))
        mask = torch.arange(-right, keys.shape[2] - right, device=q.device) <= slot
    elif k is not None:
        used = [_joined(held, new, shift) for held, new in ((keys, k), (values, v))]
        distance = torch.arange(used[0].shape[2] - 1, -1, -1, device=q.device)
        reach = seen.unsqueeze(1) if left is None else seen.unsqueeze(1).clamp(max=left)
        reach = reach if chunk_size is None else torch.minimum(reach, seen.unsqueeze(1) % chunk_size)
        mask = distance <= reach
        mask = mask if right == 0 else mask & (distance >= -right)
        if zero_kv_sink:
            sink = zero_key_logits(bias, seen.unsqueeze(1), left, right, q.new_empty(0, dtype=dtype))
        bias = None if bias is None else bias[:, distance.clamp(max=bias.shape[1] - 1)].unsqueeze(1)
    used_keys, used_values = used
    y = _attend(
        q.to(dtype), used_keys.to(dtype), used_values.to(dtype), mask, bias, sink, scale, may_see_none=right < 0
    )
    if k is not None and block:
        over = slot.view(-1, 1, 1, 1) == keys.shape[2] - 1
        keys.masked_fill_(over, 0.0)
        values.masked_fill_(over, 0.0)
    elif shift:
        keys.copy_(used_keys[:, :, 1:])
        values.copy_(used_values[:, :, 1:])
    return y.to(output_dtype), keys, values


def _joined(held: torch.Tensor, new: torch.Tensor, shift: bool) -> torch.Tensor:
    new = new.to(held.dtype).unsqueeze(2)
    if shift:
        return torch.cat([held, new], 2)
    held[:, :, -1:].copy_(new)
    return held


def _attend(q, k, v, mask, bias, sink, scale, *, may_see_none):
    """q (B, H, E), k and v (B, G, M, e), mask (B, M) bool, bias (H, 1, M), sink (B or 1, H or 1, 1) → (B, H, V)."""
    empty = None
    if mask is not None:
        if may_see_none and sink is None:
            empty = ~mask.any(1)
            mask = mask | empty.unsqueeze(1)  # a softmax over nothing is not finite; these rows are overwritten below
        mask = mask[:, None, None]
    if bias is not None or sink is not None:
        mask = torch.where(mask, q.new_zeros(()) if bias is None else bias.to(q.dtype), float("-inf"))
    if sink is not None:
        sink = sink.to(q.dtype).unsqueeze(-1).expand(q.shape[0], -1, -1, -1)
        heads = max(mask.shape[1], sink.shape[1])
        mask = torch.cat([mask.expand(-1, heads, -1, -1), sink.expand(-1, heads, -1, -1)], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    options = {"attn_mask": mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    y = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, **options).squeeze(2)
    return y if empty is None else y.masked_fill(empty[:, None, None], 0.0)


def _normalised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(torch.promote_types(dtype, torch.float32))
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).to(dtype)
