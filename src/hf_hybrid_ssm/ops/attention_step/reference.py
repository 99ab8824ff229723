"""Attention of one token, row by row: a softmax over the list of keys that it may see."""

import torch

from hf_hybrid_ssm.ops._core.self_check import draw


def attention_step_reference(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.attention_step.attention_step`; computes in float32, or float64 for float64 inputs."""
    dtype, output_dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    if head_scale is not None:
        factor = head_scale.abs().to(dtype).unsqueeze(1)
        q, k = _normalised(q, dtype) * factor, None if k is None else _normalised(k, dtype)
        bias = None if bias is None else bias * factor
    y = torch.zeros(*q.shape[:2], values.shape[3], dtype=dtype)
    for b in range(q.shape[0]):
        own = None if k is None else (k[b], v[b])
        rank = 0 if seen is None else int(seen[b])
        visible = _visible(keys[b].clone(), values[b].clone(), own, rank, window, chunk_size, block, shift)
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // keys.shape[1])
            logits, seen_values = [], []
            for key, value, distance in visible:
                logits.append((q[b, h].to(dtype) * key[g].to(dtype)).sum() * scale + _bias(bias, h, distance, dtype))
                seen_values.append(value[g].to(dtype))
            for distance in range(max(-window[1], rank + 1), window[0] + 1) if zero_kv_sink else ():
                logits.append(_bias(bias, h, distance, dtype))
                seen_values.append(torch.zeros_like(y[b, h]))
            if logits:
                y[b, h] = (torch.stack(logits).softmax(0).unsqueeze(-1) * torch.stack(seen_values)).sum(0)
        if k is not None:
            _keep(keys[b], k[b], rank, block, shift)
            _keep(values[b], v[b], rank, block, shift)
    return y.to(output_dtype), keys, values


def _visible(keys, values, own, rank, window, chunk_size, block, shift):
    """(key, value, distance) of what the token sees."""
    slots = keys.shape[1]
    if own is None:
        return [(keys[:, j], values[:, j], 0) for j in range(slots)]
    left, right = window
    if block:
        held = [(keys[:, j], values[:, j], rank % slots - j) for j in range(rank % slots)]
    else:
        before = slots if shift else slots - 1
        held = [(keys[:, j], values[:, j], before - j) for j in range(before) if before - j <= rank]
    known = [*held, (*own, 0)]
    if block:
        return [part for part in known if part[2] >= -right]
    reach = rank if left is None else left
    reach = reach if chunk_size is None else min(reach, rank % chunk_size)
    return [part for part in known if -right <= part[2] <= reach]


def _keep(held, new, rank, block, shift):
    """The new key or value (G, e) among the held ones (G, M, e), in place."""
    if block and rank % held.shape[1] == held.shape[1] - 1:
        held.zero_()
        return
    if shift:
        held[:, :-1] = held[:, 1:].clone()
    held[:, rank % held.shape[1] if block else -1] = new


def _normalised(x, dtype):
    x = x.to(dtype)
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _bias(bias, head, distance, dtype):
    return torch.zeros((), dtype=dtype) if bias is None else bias[head, min(distance, bias.shape[1] - 1)].to(dtype)


def self_check_inputs() -> dict:
    """Shared keys, a row at its start, entries that do not fill a vector."""
    shapes = {"q": (2, 4, 18), "k": (2, 2, 18), "v": (2, 2, 5), "keys": (2, 2, 7, 18), "values": (2, 2, 7, 5)}
    options = {
        "window": (6, -1),
        "chunk_size": None,
        "block": False,
        "scale": 1.0,
        "zero_kv_sink": True,
        "shift": False,
    }
    return (
        draw(shapes | {"bias": (4, 5), "head_scale": (4,)}) | options | {"seen": torch.tensor([3, 40]), "shift": False}
    )
