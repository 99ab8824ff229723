"""Attention of one token in torch: its key into its slot, a mask by distance, torch's fused attention."""

import torch
import torch.nn.functional as F


def attention_step_torch(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.attention_step.attention_step`."""
    dtype = q.dtype if q.dtype == torch.float64 or q.device.type != "cpu" else torch.float32
    output_dtype, q = q.dtype, q.to(dtype)
    if head_scale is not None:
        factor = head_scale.abs().unsqueeze(1).to(torch.promote_types(dtype, torch.float32))
        q, k = (_normalised(q) * factor).to(dtype), None if k is None else _normalised(k)
        bias = None if bias is None else bias * factor
    options = {"scale": scale, "enable_gqa": q.shape[1] != keys.shape[1]}
    if k is None:
        y = _attend(q, keys, values, None, None, **options)
    elif block:
        slot = (seen % keys.shape[2]).unsqueeze(1)
        for held, new in ((keys, k), (values, v)):
            index = slot.view(-1, 1, 1, 1).expand(-1, held.shape[1], 1, held.shape[3])
            held.scatter_(2, index, new.to(held.dtype).unsqueeze(2))
        mask = torch.arange(-window[1], keys.shape[2] - window[1], device=q.device) <= slot
        y = _attend(q, keys, values, mask, slot < -window[1] if window[1] else None, **options)
        over = slot.view(-1, 1, 1, 1) == keys.shape[2] - 1
        keys.masked_fill_(over, 0.0)
        values.masked_fill_(over, 0.0)
    else:
        used = [_joined(held, new, shift) for held, new in ((keys, k), (values, v))]
        where = {"seen": seen.unsqueeze(1), "window": window, "chunk_size": chunk_size}
        y = _attend_window(q, used[0], used[1], bias, zero_kv_sink, **where, **options)
        if shift:
            keys.copy_(used[0][:, :, 1:])
            values.copy_(used[1][:, :, 1:])
    return y.to(output_dtype), keys, values


def _attend_window(q, keys, values, bias, zero_kv_sink, *, seen, window, chunk_size, **options):
    """Of the slots, whose last is the token's own, those at the distances of the window are taken as a view."""
    left, right = window
    farthest = keys.shape[2] - 1 if left is None else min(left, keys.shape[2] - 1)
    begin, end = keys.shape[2] - 1 - farthest, keys.shape[2] + right
    keys, values = keys[:, :, begin:end], values[:, :, begin:end]
    distance = torch.arange(farthest, -right - 1, -1, device=q.device)
    reach = seen if chunk_size is None else seen % chunk_size
    mask, empty = distance <= reach, reach < -right if right else None
    if zero_kv_sink:  # what lies before the document's start is as good as a key and a value of zeros
        missing, mask, empty = ~mask[:, None, :, None], None, None
        keys, values = keys.masked_fill(missing, 0.0), values.masked_fill(missing, 0.0)
    logits = None if bias is None else bias[:, distance.clamp(max=bias.shape[1] - 1)].unsqueeze(1).to(q.dtype)
    return _attend(q, keys, values, mask, empty, logits, **options)


def _attend(q, keys, values, mask, empty, logits=None, **options):
    """q (B, H, E), keys and values (B, G, M, e); mask (B, M) bool, logits (H, 1, M); empty (B, 1): sees nothing."""
    if mask is not None:
        # a softmax over nothing is not finite; such rows are overwritten below
        mask = (mask if empty is None else mask | empty)[:, None, None]
        logits = mask if logits is None else torch.where(mask, logits, float("-inf"))
    elif logits is not None:
        logits = logits.unsqueeze(0)
    options["attn_mask"] = logits
    y = F.scaled_dot_product_attention(q.unsqueeze(2), keys.to(q.dtype), values.to(q.dtype), **options).squeeze(2)
    return y if empty is None else y.masked_fill(empty.unsqueeze(2), 0.0)


def _joined(held: torch.Tensor, new: torch.Tensor, shift: bool) -> torch.Tensor:
    new = new.to(held.dtype).unsqueeze(2)
    if shift:
        return torch.cat([held, new], 2)
    held[:, :, -1:].copy_(new)
    return held


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) in float32 or wider, as the root-mean-square norm that it is."""
    size = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, (size,), eps=1e-6 / size) * size**-0.5
