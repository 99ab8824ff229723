"""Local attention, token by token: a softmax over the list of keys that a token may see."""

import torch

from hf_hybrid_ssm.ops._core.self_check import draw


def local_attention_reference(
    q, k, v, *, window, chunk_size, bias, scale, zero_kv_sink, dropout, state, seq_idx, lengths
):
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`; computes in float32, or float64 for float64 inputs."""
    if dropout:
        raise ValueError("the reference has no dropout.")
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, length, _ = q.shape
    shared = heads // k.shape[1]
    left, right = window
    two_sided = right is None or right > 0
    y = torch.zeros(batch, heads, length, v.shape[3], dtype=dtype)
    for b in range(batch):
        seen = 0 if state is None else int(state.seen[b])
        held = 0 if state is None else min(seen, state.keys.shape[2])
        document = [0] * length if seq_idx is None else seq_idx[b].tolist()
        known = [(document[0] if length else 0, seen - held + s) for s in range(held)]  # (document, rank in it)
        keys = [] if state is None else list(state.keys[b].unbind(1)[state.keys.shape[2] - held :])
        values = [] if state is None else list(state.values[b].unbind(1)[state.keys.shape[2] - held :])
        for i in range(length if lengths is None else int(lengths[b])):
            first = document[i] == document[0]
            known.append((document[i], seen + i if first else i - document.index(document[i])))
            keys.append(k[b, :, i])
            values.append(v[b, :, i])
        for i in range(held, len(known)):
            logits, seen_values = [], []
            for j in range(len(known)):
                near = (left is None or i - j <= left) and (right is None or j - i <= right)
                same_chunk = chunk_size is None or known[i][1] // chunk_size == known[j][1] // chunk_size
                if near and same_chunk and known[i][0] == known[j][0]:
                    product = (q[b, :, i - held].to(dtype) * keys[j].repeat_interleave(shared, 0).to(dtype)).sum(-1)
                    logits.append(product * scale + _bias(bias, i - j, two_sided, heads, dtype))
                    seen_values.append(values[j].repeat_interleave(shared, 0).to(dtype))
            if zero_kv_sink:
                for distance in range(max(-right, known[i][1] + 1), left + 1):
                    logits.append(_bias(bias, distance, two_sided, heads, dtype))
                    seen_values.append(torch.zeros_like(y[b, :, 0]))
            if logits:
                y[b, :, i - held] = (torch.stack(logits).softmax(0).unsqueeze(-1) * torch.stack(seen_values)).sum(0)
    return y.to(q.dtype)


def _bias(bias, distance, two_sided, heads, dtype):
    if bias is None:
        return torch.zeros(heads, dtype=dtype)
    column = distance + bias.shape[1] // 2 if two_sided else distance
    return bias[:, min(max(column, 0), bias.shape[1] - 1)].to(dtype)


def self_check_inputs() -> dict:
    """More than one block, a bias, and zeros before the row."""
    options = {"window": (12, -1), "chunk_size": None, "scale": 0.25, "zero_kv_sink": True, "dropout": 0.0}
    options |= {"state": None, "seq_idx": None, "lengths": None}
    return draw(dict.fromkeys("qkv", (1, 2, 150, 16)) | {"bias": (2, 9)}) | options
