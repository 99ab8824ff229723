"""Local attention in torch: blocks of queries against the keys in reach, through scaled_dot_product_attention."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops._core.transforms import attention
from hf_hybrid_ssm.ops.local_attention import biased
from hf_hybrid_ssm.ops.local_attention.distance_range import (
    AttentionState,
    DistanceRange,
    bias_by_distance,
    push,
    reach_of_tokens,
    zero_key_logits,
)


def run(q, k, v, *, nearest, farthest, chunk_size, bias, scale, zero_keys, dropout, state, seq_idx, lengths, capacity):
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`."""
    length = q.shape[2]
    reach = reach_of_tokens(
        length,
        nearest,
        farthest,
        chunk_size,
        seen=None if state is None else state.seen,
        seq_idx=seq_idx,
        lengths=lengths,
        device=q.device,
    )
    if lengths is not None:  # a NaN in the padding must not reach a product with a real token
        real = (torch.arange(length, device=q.device) < lengths.unsqueeze(1))[:, None, :, None]
        k, v = torch.where(real, k, 0.0), torch.where(real, v, 0.0)
    two_sided = nearest is None or nearest < 0
    dtype = torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype
    sink = None
    if zero_keys:
        sink = zero_key_logits(bias, reach.rank, nearest, farthest, q.new_empty(0, dtype=dtype))
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype))
    options = {"bias": bias, "two_sided": two_sided, "sink": sink, "scale": scale, "dropout": dropout}
    span = None if nearest is None or farthest is None else max(farthest - nearest, 16)
    is_plain = state is None and seq_idx is None and lengths is None and not zero_keys
    if span is None or length <= span:
        y = _dense(*inputs, state, reach, **options)
    elif chunk_size is not None and state is None and seq_idx is None:  # the chunks themselves are the blocks
        inner = (0, length // chunk_size) if is_plain else None
        y = _blocks(*inputs, None, reach, 0, 0, chunk_size, inner=inner, limits=(nearest, farthest), **options)
    else:
        size = max(span // 2, 16) if two_sided else span
        inner = (-(-farthest // size), (length + min(nearest, 0)) // size) if is_plain and chunk_size is None else None
        limits = (nearest, farthest)
        y = _blocks(*inputs, state, reach, nearest, farthest, size, inner=inner, limits=limits, **options)
    return y.to(q.dtype), push(state, k, v, capacity, seq_idx, lengths)


def _dense(q, k, v, state, reach: DistanceRange, *, bias, two_sided, sink, scale, dropout):
    """All keys for each query: for pieces no longer than the window, and for unlimited reach."""
    held = 0
    if state is not None:
        held = state.keys.shape[2]
        k = torch.cat([state.keys.to(k.dtype), k], 2)
        v = torch.cat([state.values.to(v.dtype), v], 2)
    column = torch.arange(q.shape[2], device=q.device)
    distance = (column + held).unsqueeze(1) - torch.arange(k.shape[2], device=q.device)
    allowed = (distance >= reach.first.unsqueeze(-1)) & (distance <= reach.last.unsqueeze(-1))
    logits = None if bias is None else bias_by_distance(bias, distance, two_sided).unsqueeze(0)
    sink = None if sink is None else sink.unsqueeze(-1)
    return _attend(q, k, v, allowed.unsqueeze(1), logits, sink, scale, dropout)


def _blocks(
    q,
    k,
    v,
    state,
    reach: DistanceRange,
    nearest,
    farthest,
    size,
    *,
    inner,
    limits,
    bias,
    two_sided,
    sink,
    scale,
    dropout,
):
    """Blocks of `size` queries, each against the size + farthest - nearest keys that its tokens can reach.

    `inner`, a range of blocks or None: where every token reaches exactly the distances `limits`, so that all blocks
    share one mask.
    """
    batch, heads, length, _ = q.shape
    count = -(-length // size)
    behind = count * size - length
    width = size + farthest - nearest

    def key_blocks(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if old is None:
            new = F.pad(new, (0, 0, farthest, behind - nearest))
        else:
            new = F.pad(torch.cat([old.to(new.dtype), new], 2), (0, 0, 0, behind - nearest))
        return new.unfold(2, width, size).permute(0, 2, 1, 4, 3)  # (B, count, G, width, E)

    def query_blocks(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 0, 0, behind)).unflatten(2, (count, size)).transpose(1, 2)

    query, key = torch.arange(size, device=q.device), torch.arange(width, device=q.device)
    distance = query.unsqueeze(1) - key + farthest
    first, last = torch.broadcast_tensors(reach.first, reach.last)
    first, last = (F.pad(limit, (0, behind)).reshape(-1, count, size, 1) for limit in (first, last))
    logits = None if bias is None else bias_by_distance(bias, distance, two_sided).unsqueeze(0)
    sink = None if sink is None else query_blocks(sink.expand(first.shape[0], -1, -1).unsqueeze(-1))
    old_keys, old_values = (None, None) if state is None else (state.keys, state.values)
    begin, end = (0, 0) if inner is None or inner[1] - inner[0] < 2 else inner
    # split, not slices: the gradient of a slice is a whole tensor of zeros around it
    pieces = [begin, end - begin, count - end]
    parts = zip(
        query_blocks(q).split(pieces, 1),
        key_blocks(old_keys, k).split(pieces, 1),
        key_blocks(old_values, v).split(pieces, 1),
        first.split(pieces, 1),
        last.split(pieces, 1),
        [None] * 3 if sink is None else sink.split(pieces, 1),
    )
    shared = ((distance >= limits[0]) & (distance <= limits[1]))[None, None]
    outputs = []
    for index, (queries, keys, values, low, high, sinks) in enumerate(parts):
        if pieces[index] == 0:
            continue
        allowed = shared
        if index != 1:
            allowed = ((distance >= low) & (distance <= high)).expand(batch, -1, -1, -1).reshape(-1, 1, size, width)
            sinks = None if sinks is None else sinks.expand(batch, *(-1,) * 4).flatten(0, 1)
        queries, keys, values = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        y = _attend(queries, keys, values, allowed, logits, sinks, scale, dropout)
        outputs.append(y.unflatten(0, (batch, pieces[index])))
    y = torch.cat(outputs, 1)
    return y.transpose(1, 2).reshape(batch, heads, count * size, -1)[:, :, :length]


def _attend(q, k, v, allowed, logits, sink, scale, dropout):
    """softmax(q k^T scale + logits) v over the allowed keys, and 0 where there is none.

    `allowed` (R or 1, 1, Q, K) bool, `logits` (1, H, Q, K) or None, `sink` (R or 1, H or 1, Q, 1) or None: the logit
    of one more key whose value is 0.
    """
    mask, empty = allowed, None
    if sink is None:
        empty = ~allowed.any(-1, keepdim=True)
        mask = allowed | empty  # a softmax over nothing is not finite; such rows are overwritten below
        if biased.serves(q, k, v, logits, dropout):
            return torch.where(empty, 0.0, biased.biased_attention(q, k, v, mask, logits.to(q.dtype), scale))
    if logits is not None or sink is not None:
        zero = torch.zeros((), dtype=q.dtype, device=q.device) if logits is None else logits.to(q.dtype)
        mask = torch.where(mask, zero, float("-inf"))
    if sink is not None:
        mask, sink = mask.expand(-1, max(mask.shape[1], sink.shape[1]), -1, -1), sink.to(q.dtype)
        shape = (*torch.broadcast_shapes(mask.shape[:3], sink.shape[:3]), 1)
        mask = torch.cat([mask.expand(*shape[:3], -1), sink.expand(shape)], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    grouped = q.shape[1] != k.shape[1]
    options = {"attn_mask": mask, "dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    y = attention(q, k, v, **options)
    return y if empty is None else torch.where(empty, 0.0, y)


__all__ = ["AttentionState", "run"]
