"""Local attention in torch: blocks of queries against the keys of their windows, by torch's fused attention."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.local_attention.biased import biased_attention, can_use_cpu_flash_with_bias
from hf_hybrid_ssm.ops.local_attention.distance_range import (
    DistanceRange,
    bias_by_distance,
    distance_ranges,
    zero_key_logits,
)
from hf_hybrid_ssm.ops.local_attention.sink import Sink, append_sink
from hf_hybrid_ssm.ops.local_attention.uniform import has_uniform_blocks, uniform_attention


def local_attention_torch(
    q,
    k,
    v,
    *,
    window,
    chunk_size,
    bias,
    scale,
    zero_kv_sink,
    sink_logits,
    sink_values,
    dropout,
    state,
    seq_idx,
    lengths,
):
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`."""
    (left, right), length = window, q.shape[2]
    seen, has_sink = None if state is None else state.seen, sink_logits is not None
    if not has_sink and is_causal_by_chunk(window, chunk_size, bias, dropout, state, seq_idx):
        dtype = _computed_in(q)
        k, v = zero_beyond(k, lengths, dim=2), zero_beyond(v, lengths, dim=2)
        return causal_chunks(q.to(dtype), k.to(dtype), v.to(dtype), chunk_size, scale).to(q.dtype)
    uniform = {"chunk_size": chunk_size, "zero_kv_sink": zero_kv_sink}
    if not has_sink and has_uniform_blocks(q, k, window=window, state=state, seq_idx=seq_idx, **uniform):
        k, v = zero_beyond(k, lengths, dim=2), zero_beyond(v, lengths, dim=2)
        dtype = _computed_in(q)
        inputs = (q.to(dtype), k.to(dtype), v.to(dtype))
        y = uniform_attention(*inputs, left=left, right=right, bias=bias, scale=scale, dropout=dropout, **uniform)
        return y.to(q.dtype)
    ranges = distance_ranges(length, window, chunk_size, seen=seen, seq_idx=seq_idx, lengths=lengths, device=q.device)
    k, v = zero_beyond(k, lengths, dim=2), zero_beyond(v, lengths, dim=2)
    two_sided = right is None or right > 0
    dtype = _computed_in(q)
    sink = None
    if zero_kv_sink:
        sink = Sink(zero_key_logits(bias, ranges.rank, left, right, q.new_empty(0, dtype=dtype)), None, True)
    elif has_sink:
        sink = Sink(sink_logits.to(dtype), sink_values, False)
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype))
    options = {"bias": bias, "two_sided": two_sided, "sink": sink, "scale": scale, "dropout": dropout}
    span = None if left is None or right is None else max(left + right, 16)
    is_plain = state is None and seq_idx is None and lengths is None and sink is None
    if span is None or length <= span:
        y = _dense(*inputs, state, ranges, **options)
    elif chunk_size is not None and state is None and seq_idx is None:  # the chunks themselves are the blocks
        inner = (0, length // chunk_size) if is_plain else None
        y = _blocks(*inputs, None, ranges, (0, 0), chunk_size, inner=inner, window=window, **options)
    else:
        size = max(span // 2, 16) if two_sided else span
        inner = (-(-left // size), (length - max(right, 0)) // size) if is_plain and chunk_size is None else None
        y = _blocks(*inputs, state, ranges, window, size, inner=inner, window=window, **options)
    return y.to(q.dtype)


def is_causal_by_chunk(window, chunk_size, bias, dropout, state, seq_idx) -> bool:
    """Whether these arguments of `local_attention` are those of `causal_chunks`."""
    is_new = state is None and seq_idx is None
    return is_new and chunk_size is not None and window == (chunk_size - 1, 0) and bias is None and not dropout


def causal_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk_size: int, scale: float) -> torch.Tensor:
    """Causal attention within chunks: a batch of them, of q (B, H, L, E), k (B, G, L, E), v (B, G, L, V)."""
    batch, heads, length, _ = q.shape
    size = max(min(chunk_size, length), 1)
    count = -(-length // size)
    q, k, v = (
        F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
        for x in (q, k, v)
    )
    grouped = bool(heads != k.shape[1])  # sizes of a trace may be symbolic
    y = attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return y.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _computed_in(q: torch.Tensor) -> torch.dtype:
    """The dtype of the products: on a CPU, where narrow ones are slow and less exact, at least float32."""
    return torch.float32 if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16) else q.dtype


def _dense(q, k, v, state, ranges: DistanceRange, *, bias, two_sided, sink, scale, dropout):
    """All keys for each query: for pieces no longer than the window, and for unlimited windows."""
    held = 0
    if state is not None:
        held = state.keys.shape[2]
        k = torch.cat([state.keys.to(k.dtype), k], 2)
        v = torch.cat([state.values.to(v.dtype), v], 2)
    column = torch.arange(q.shape[2], device=q.device)
    distance = (column + held).unsqueeze(1) - torch.arange(k.shape[2], device=q.device)
    allowed = (distance >= ranges.first.unsqueeze(-1)) & (distance <= ranges.last.unsqueeze(-1))
    logits = None if bias is None else bias_by_distance(bias, distance, two_sided).unsqueeze(0)
    sink = None if sink is None else sink._replace(logits=sink.logits.unsqueeze(-1))
    return _attend(q, k, v, allowed.unsqueeze(1), logits, sink, scale, dropout)


def _blocks(
    q,
    k,
    v,
    state,
    ranges: DistanceRange,
    around: tuple[int, int],
    size,
    *,
    inner,
    window,
    bias,
    two_sided,
    sink,
    scale,
    dropout,
):
    """Blocks of `size` queries, each against its own keys, `around[0]` before them and `around[1]` after them.

    `inner`, a range of blocks or None: where every token sees its whole `window`, so that all blocks share one mask.
    """
    batch, heads, length, _ = q.shape
    before, after = around
    count = -(-length // size)
    padding = count * size - length
    width = size + before + after

    def key_blocks(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        if old is None:
            new = F.pad(new, (0, 0, before, padding + after))
        else:
            new = F.pad(torch.cat([old.to(new.dtype), new], 2), (0, 0, 0, padding + after))
        return new.unfold(2, width, size).permute(0, 2, 1, 4, 3)  # (B, count, G, width, E)

    def query_blocks(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 0, 0, padding)).unflatten(2, (count, size)).transpose(1, 2)

    query, key = torch.arange(size, device=q.device), torch.arange(width, device=q.device)
    distance = query.unsqueeze(1) - key + before
    first, last = torch.broadcast_tensors(ranges.first, ranges.last)
    first, last = (F.pad(limit, (0, padding)).reshape(-1, count, size, 1) for limit in (first, last))
    logits = None if bias is None else bias_by_distance(bias, distance, two_sided).unsqueeze(0)
    of_sink = None if sink is None else query_blocks(sink.logits.unsqueeze(-1)).expand(batch, *(-1,) * 4)
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
        [None] * 3 if of_sink is None else of_sink.split(pieces, 1),
    )
    shared = ((distance >= -window[1]) & (distance <= window[0]))[None, None]
    outputs = []
    for index, (queries, keys, values, low, high, sinks) in enumerate(parts):  # with a sink, none is inner
        if pieces[index] == 0:
            continue
        allowed = shared
        if index != 1:
            allowed = ((distance >= low) & (distance <= high)).expand(batch, -1, -1, -1).reshape(-1, 1, size, width)
        own_sink = None if sinks is None else sink._replace(logits=sinks.flatten(0, 1))
        queries, keys, values = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        y = _attend(queries, keys, values, allowed, logits, own_sink, scale, dropout)
        outputs.append(y.unflatten(0, (batch, pieces[index])))
    y = torch.cat(outputs, 1)
    return y.transpose(1, 2).reshape(batch, heads, count * size, y.shape[-1])[:, :, :length]


def _attend(q, k, v, allowed, logits, sink, scale, dropout):
    """softmax(q k^T scale + logits) v over the allowed keys, and 0 where there is none.

    `allowed` (R or 1, 1, Q, K) bool, `logits` (1, H, Q, K) or None, `sink` with logits (R or 1, H or 1, Q, 1) or None.
    """
    mask, empty = allowed, None
    if sink is None or not sink.is_everywhere:
        empty = ~allowed.any(-1, keepdim=True)
        empty = empty if sink is None else empty & sink.logits.isneginf()
        mask = allowed | empty  # a softmax over nothing is not finite; such rows are overwritten below
    if logits is not None or sink is not None:
        zero = torch.zeros((), dtype=q.dtype, device=q.device) if logits is None else logits.to(q.dtype)
        mask = torch.where(mask, zero, float("-inf"))
    if sink is not None:
        shape = (*torch.broadcast_shapes(mask.shape[:3], sink.logits.shape[:3]), 1)
        mask = torch.cat([mask.expand(*shape[:3], -1), sink.logits.to(q.dtype).expand(shape)], -1)
        k, v = append_sink(k, v, sink.values, q.shape[1])
    if empty is not None and can_use_cpu_flash_with_bias(q, k, v, logits if sink is None else mask, dropout):
        return torch.where(empty, 0.0, biased_attention(q, k, v, mask, scale))
    grouped = bool(q.shape[1] != k.shape[1])  # sizes of a trace may be symbolic
    options = {"attn_mask": mask, "dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    y = attention(q, k, v, **options)
    return y if empty is None else torch.where(empty, 0.0, y)


def attention_step_torch(
    q,
    k,
    v,
    keys,
    values,
    seen,
    *,
    window,
    chunk_size,
    block,
    bias,
    scale,
    head_scale,
    zero_kv_sink,
    sink_logits,
    sink_values,
    shift,
):
    """See `hf_hybrid_ssm.ops.local_attention.slot_attention`."""
    dtype = q.dtype if q.dtype == torch.float64 or q.device.type != "cpu" else torch.float32
    output_dtype, q = q.dtype, q.to(dtype)
    if head_scale is not None:
        factor = head_scale.abs().to(torch.promote_types(dtype, torch.float32))
        q, k = (_normalised(q) * factor.view(-1, 1, 1)).to(dtype), None if k is None else _normalised(k)
        bias = None if bias is None else bias * factor.unsqueeze(1)
    sink = None if sink_logits is None else Sink(sink_logits.to(dtype), sink_values, False)
    options = {"scale": scale, "sink": sink}
    if k is None:
        y = _attend_slots(q, keys, values, None, None, **options)
    elif block:
        slot = (seen % keys.shape[2]).unsqueeze(1)
        for held, new in ((keys, k), (values, v)):
            index = slot.view(-1, 1, 1, 1).expand(-1, held.shape[1], 1, held.shape[3])
            held.scatter_(2, index, new.to(held.dtype))
        mask = torch.arange(-window[1], keys.shape[2] - window[1], device=q.device) <= slot
        y = _attend_slots(q, keys, values, mask, slot < -window[1] if window[1] else None, **options)
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
        more = left - farthest  # distances for which there is no slot: within the document, they hold nothing
        if more > 0:
            distance = torch.arange(left, -right - 1, -1, device=q.device)
            keys, values = (F.pad(part, (0, 0, more, 0)) for part in (keys, values))
        missing = distance > reach
        lost = (distance > farthest) & ~missing
        keys, values = (part.masked_fill(missing[:, None, :, None], 0.0) for part in (keys, values))
        mask, empty = (None, None) if more <= 0 else (~lost, lost.all(1, keepdim=True))
    logits = None if bias is None else bias[:, distance.clamp(max=bias.shape[1] - 1)].unsqueeze(1).to(q.dtype)
    return _attend_slots(q, keys, values, mask, empty, logits, **options)


def _attend_slots(q, keys, values, mask, empty, logits=None, *, sink, scale):
    """q (B, H, 1, E), keys and values (B, G, M, e); mask (B, M) bool, logits (H, 1, M); empty (B, 1): sees nothing."""
    if sink is not None:
        return _attend_slots_and_sink(q, keys, values, mask, logits, sink, scale)
    if mask is not None:
        # a softmax over nothing is not finite; such rows are overwritten below
        mask = (mask if empty is None else mask | empty)[:, None, None]
        logits = mask if logits is None else torch.where(mask, logits, float("-inf"))
    elif logits is not None:
        logits = logits.unsqueeze(0)
    options = {"attn_mask": logits, "scale": scale, "enable_gqa": bool(q.shape[1] != keys.shape[1])}
    y = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), **options)
    return y if empty is None else y.masked_fill(empty.view(-1, 1, 1, 1), 0.0)


def _attend_slots_and_sink(q, keys, values, mask, logits, sink, scale):
    """The same with a sink of logits (B, H, 1) beside the slots."""
    column = sink.logits.unsqueeze(3)
    logits = column.new_zeros(1, 1, 1) if logits is None else logits
    logits = logits if mask is None else torch.where(mask[:, None, None], logits, float("-inf"))
    logits = torch.cat([logits.expand(*column.shape[:3], keys.shape[2]), column], -1)
    empty = logits.isneginf().all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    keys, values = append_sink(keys.to(q.dtype), values.to(q.dtype), sink.values, q.shape[1])
    options = {"attn_mask": logits, "scale": scale, "enable_gqa": bool(q.shape[1] != keys.shape[1])}
    y = F.scaled_dot_product_attention(q, keys, values, **options)
    return y.masked_fill(empty, 0.0)


def _joined(held: torch.Tensor, new: torch.Tensor, shift: bool) -> torch.Tensor:
    new = new.to(held.dtype)
    if shift:
        return torch.cat([held, new], 2)
    held[:, :, -1:].copy_(new)
    return held


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) in float32 or wider, as the root-mean-square norm that it is."""
    size = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, (size,), eps=1e-6 / size) * size**-0.5
