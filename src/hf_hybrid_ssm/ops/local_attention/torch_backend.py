"""Local attention in torch: blocks of queries against the keys of their windows, by torch's fused attention."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.transforms import is_exporting
from hf_hybrid_ssm.ops.local_attention.biased import biased_attention, can_use_cpu_flash_with_bias
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs, StepInputs
from hf_hybrid_ssm.ops.local_attention.sink import Sink, append_sink
from hf_hybrid_ssm.ops.local_attention.uniform import has_uniform_blocks, uniform_attention


def local_attention_torch(inputs: AttentionInputs) -> torch.Tensor:
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`."""
    dtype, lengths = _computed_in(inputs.q), inputs.lengths
    k, v = (zero_beyond(part, lengths, dim=2).to(dtype) for part in (inputs.k, inputs.v))
    problem = inputs._replace(q=inputs.q.to(dtype), k=k, v=v)  # with zeros in padding
    attend = next(attend for suits, attend in STRATEGIES if suits(problem))
    return attend(problem).to(inputs.q.dtype)


def _is_of_any_length(problem: AttentionInputs) -> bool:
    """In an exported graph whose length is free: how many blocks a row has would be a part of the graph."""
    return is_exporting() and not isinstance(problem.length, int)


def _by_causal_chunks(problem: AttentionInputs) -> torch.Tensor:
    """Causal attention within chunks: a batch of them."""
    assert problem.chunk_size is not None
    batch, heads, length, _ = problem.q.shape
    size = max(min(problem.chunk_size, length), 1)
    count = -(-length // size)
    q, k, v = (
        F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size)).transpose(1, 2).flatten(0, 1)
        for x in problem[:3]
    )
    grouped = bool(heads != k.shape[1])  # sizes of a trace may be symbolic
    y = attention(q, k, v, is_causal=True, scale=problem.scale, enable_gqa=grouped)
    return y.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _is_short(problem: AttentionInputs) -> bool:
    """A piece no longer than the window, or a window without a limit."""
    left, right = problem.window
    return left is None or right is None or problem.length <= max(left + right, 16)


def _is_in_chunks(problem: AttentionInputs) -> bool:
    """The chunks themselves are the blocks."""
    return problem.chunk_size is not None and problem.is_new


def _by_chunks(problem: AttentionInputs) -> torch.Tensor:
    assert problem.chunk_size is not None
    return _blocks(problem, (0, 0), problem.chunk_size, inner=(0, problem.length // problem.chunk_size))


def _by_windows(problem: AttentionInputs) -> torch.Tensor:
    left, right = problem.window
    span = max(left + right, 16)
    size = max(span // 2, 16) if problem.two_sided else span
    inner = (-(-left // size), (problem.length - max(right, 0)) // size) if problem.chunk_size is None else None
    return _blocks(problem, problem.window, size, inner=inner)


def _computed_in(q: torch.Tensor) -> torch.dtype:
    """The dtype of the products: on a CPU, where narrow ones are slow and less exact, at least float32."""
    return torch.float32 if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16) else q.dtype


def _dense(problem: AttentionInputs) -> torch.Tensor:
    """All keys for each query."""
    q, k, v, state, ranges, held = problem.q, problem.k, problem.v, problem.state, problem.ranges(), 0
    if state is not None:
        held = state.keys.shape[2]
        k = torch.cat([state.keys.to(k.dtype), k], 2)
        v = torch.cat([state.values.to(v.dtype), v], 2)
    column = torch.arange(q.shape[2], device=q.device)
    distance = (column + held).unsqueeze(1) - torch.arange(k.shape[2], device=q.device)
    allowed = (distance >= ranges.first.unsqueeze(-1)) & (distance <= ranges.last.unsqueeze(-1))
    sink = problem.sink(ranges)
    sink = None if sink is None else sink._replace(logits=sink.logits.unsqueeze(-1))
    logits = problem.bias_at(distance)
    return _attend(problem, q, k, v, allowed.unsqueeze(1), logits, sink)


def _blocks(
    problem: AttentionInputs, around: tuple[int, int], size: int, *, inner: tuple[int, int] | None
) -> torch.Tensor:
    """Blocks of `size` queries, each against its own keys, `around[0]` before them and `around[1]` after them.

    `inner`, a range of blocks or None: where every token of plain rows sees its whole window, so that all blocks share
    one mask.
    """
    q, ranges, (before, after) = problem.q, problem.ranges(), around
    batch, heads, length, _ = q.shape
    count = -(-length // size)
    width = size + before + after
    query, key = torch.arange(size, device=q.device), torch.arange(width, device=q.device)
    distance = query.unsqueeze(1) - key + before
    first, last = torch.broadcast_tensors(ranges.first, ranges.last)
    first, last = (F.pad(part, (0, count * size - length)).reshape(-1, count, size, 1) for part in (first, last))
    sink, of_sink = problem.sink(ranges), None
    if sink is not None:
        of_sink = _query_blocks(sink.logits.unsqueeze(-1), size).expand(batch, *(-1,) * 4)
    old = (None, None) if problem.state is None else (problem.state.keys, problem.state.values)
    begin, end = (0, 0) if inner is None or not problem.is_plain or inner[1] - inner[0] < 2 else inner
    # split, not slices: the gradient of a slice is a whole tensor of zeros around it
    pieces = [begin, end - begin, count - end]
    parts = zip(
        _query_blocks(q, size).split(pieces, 1),
        _key_blocks(old[0], problem.k, size, around).split(pieces, 1),
        _key_blocks(old[1], problem.v, size, around).split(pieces, 1),
        first.split(pieces, 1),
        last.split(pieces, 1),
        [None] * 3 if of_sink is None else of_sink.split(pieces, 1),
    )
    logits, (left, right) = problem.bias_at(distance), problem.window
    outputs = []
    for index, (queries, keys, values, low, high, sinks) in enumerate(parts):  # with a sink, none is inner
        if pieces[index] == 0:
            continue
        if index == 1:
            allowed = ((distance >= -right) & (distance <= left))[None, None]
        else:
            allowed = ((distance >= low) & (distance <= high)).expand(batch, -1, -1, -1).reshape(-1, 1, size, width)
        own_sink = None if sinks is None or sink is None else sink._replace(logits=sinks.flatten(0, 1))
        inputs = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        y = _attend(problem, *inputs, allowed, logits, own_sink)
        outputs.append(y.unflatten(0, (batch, pieces[index])))
    y = torch.cat(outputs, 1)
    return y.transpose(1, 2).reshape(batch, heads, count * size, y.shape[-1])[:, :, :length]


def _query_blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, L, E) → (B, count, H, size, E)."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size)).transpose(1, 2)


def _key_blocks(old: torch.Tensor | None, new: torch.Tensor, size: int, around: tuple[int, int]) -> torch.Tensor:
    """Keys or values (B, G, L, E) → (B, count, G, width, E): before them lie `old` ones, or nothing."""
    before, after = around
    gap = -new.shape[2] % size + after
    new = F.pad(new, (0, 0, before, gap)) if old is None else torch.cat([old.to(new.dtype), new], 2)
    new = new if old is None else F.pad(new, (0, 0, 0, gap))
    return new.unfold(2, size + before + after, size).permute(0, 2, 1, 4, 3)


def _attend(
    problem: AttentionInputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    allowed: torch.Tensor,
    logits: torch.Tensor | None,
    sink: Sink | None,
) -> torch.Tensor:
    """softmax(q k^T scale + logits) v over the allowed keys, and 0 where there is none.

    `allowed` (R or 1, 1, Q, K) bool, `logits` (1, H, Q, K) or None, `sink` with logits (R or 1, H or 1, Q, 1) or None.
    """
    mask, empty, scale, dropout = allowed, None, problem.scale, problem.dropout
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
    if problem.softcap is not None:
        y = _capped(q, k, v, mask, problem)
        return y if empty is None else torch.where(empty, 0.0, y)
    if empty is not None and can_use_cpu_flash_with_bias(q, k, v, logits if sink is None else mask, dropout):
        return torch.where(empty, 0.0, biased_attention(q, k, v, mask, scale))
    grouped = bool(q.shape[1] != k.shape[1])  # sizes of a trace may be symbolic
    options = {"attn_mask": mask, "dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    y = attention(q, k, v, **options)
    return y if empty is None else torch.where(empty, 0.0, y)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, problem: AttentionInputs
) -> torch.Tensor:
    """softmax(c tanh(q k^T scale / c) + mask) v by its equation: torch's kernels have none for it."""
    assert problem.softcap is not None
    cap, by_group = problem.softcap, q.unflatten(1, (k.shape[1], -1))  # (R, G, H / G, Q, E)
    logits = (torch.matmul(by_group, k.unsqueeze(2).mT) * (problem.scale / cap)).tanh().flatten(1, 2) * cap
    logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32)).to(v.dtype)
    return torch.matmul(F.dropout(weights, problem.dropout).unflatten(1, by_group.shape[1:3]), v.unsqueeze(2)).flatten(
        1, 2
    )


STRATEGIES: tuple[tuple[Callable[[AttentionInputs], bool], Callable[[AttentionInputs], torch.Tensor]], ...] = (
    (_is_of_any_length, _dense),
    (lambda problem: problem.is_causal_by_chunk, _by_causal_chunks),
    (has_uniform_blocks, uniform_attention),
    (_is_short, _dense),
    (_is_in_chunks, _by_chunks),
    (lambda problem: True, _by_windows),
)
"""The first that suits a problem attends."""


def attention_step_torch(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.local_attention.slot_attention`."""
    q, k, v, keys, values, seen, bias, head_scale, sink_logits, sink_values, window, *_ = inputs
    layout, right = inputs.layout, window[1]
    dtype = q.dtype if q.dtype == torch.float64 or q.device.type != "cpu" else torch.float32
    output_dtype, q = q.dtype, q.to(dtype)
    if head_scale is not None:
        factor = head_scale.abs().to(torch.promote_types(dtype, torch.float32))
        q, k = (_normalised(q) * factor.view(-1, 1, 1)).to(dtype), None if k is None else _normalised(k)
        bias = None if bias is None else bias * factor.unsqueeze(1)
    sink = None if sink_logits is None else Sink(sink_logits.to(dtype), sink_values, False)
    options: dict[str, Any] = {"scale": inputs.scale, "sink": sink}
    if k is None or v is None or seen is None:
        mask = inputs.mask
        y = _attend_slots(q, keys, values, mask, None if mask is None else ~mask.any(1, keepdim=True), **options)
    elif layout == "by_rank" and window[0] is None:
        _put(keys, k, seen)
        _put(values, v, seen)
        y = _attend_ranks(inputs, q, bias, seen.unsqueeze(1), **options)
    elif layout == "by_rank":  # the token's own slot may hold the oldest one that it sees
        slot, slots = torch.remainder(seen, keys.shape[2]).unsqueeze(1), torch.arange(keys.shape[2], device=q.device)
        ahead = slot + keys.shape[2] - 1 - slots  # not negative: ExecuTorch has the remainder of C
        distance = F.pad(torch.remainder(ahead, keys.shape[2]) + 1, (0, 1))
        all_keys, all_values = (torch.cat([held, new.to(held.dtype)], 2) for held, new in ((keys, k), (values, v)))
        y = _attend_window(inputs, q, all_keys, all_values, distance, bias, seen.unsqueeze(1), **options)
        _put(keys, k, slot)
        _put(values, v, slot)
    elif layout == "block":
        slot = torch.remainder(seen, keys.shape[2]).unsqueeze(1)
        _put(keys, k, slot)
        _put(values, v, slot)
        mask = torch.arange(-right, keys.shape[2] - right, device=q.device) <= slot
        y = _attend_slots(q, keys, values, mask, slot < -right if right else None, **options)
        over = slot.view(-1, 1, 1, 1) == keys.shape[2] - 1
        keys.masked_fill_(over, 0.0)
        values.masked_fill_(over, 0.0)
    else:
        keys[:, :, -1:].copy_(k)
        values[:, :, -1:].copy_(v)
        farthest = keys.shape[2] - 1 if window[0] is None else min(window[0], keys.shape[2] - 1)
        begin, end = keys.shape[2] - 1 - farthest, keys.shape[2] + right
        distance = torch.arange(farthest, -right - 1, -1, device=q.device).unsqueeze(0)
        near_keys, near_values = keys[:, :, begin:end], values[:, :, begin:end]  # views
        y = _attend_window(inputs, q, near_keys, near_values, distance, bias, seen.unsqueeze(1), **options)
    return y.to(output_dtype), keys, values


def _put(held: torch.Tensor, new: torch.Tensor, slot: torch.Tensor) -> None:
    """new (B, G, 1, e) into the slots (B,) or (B, 1) of held (B, G, M, e), in place."""
    index = slot.view(-1, 1, 1, 1).expand(-1, held.shape[1], 1, held.shape[3])
    held.scatter_(2, index, new.to(held.dtype))


def _attend_ranks(
    inputs: StepInputs, q: torch.Tensor, bias: torch.Tensor | None, seen: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Of slots by rank, with the token's own among them."""
    right, distance = inputs.window[1], seen - torch.arange(inputs.keys.shape[2], device=q.device)
    mask = (distance >= -right) & (distance <= (seen if inputs.chunk_size is None else seen % inputs.chunk_size))
    logits = None
    if bias is not None:
        logits = bias[:, distance.clamp(0, bias.shape[1] - 1)].transpose(0, 1).unsqueeze(2).to(q.dtype)
    empty = ~mask.any(1, keepdim=True) if right else None
    return _attend_slots(q, inputs.keys, inputs.values, mask, empty, logits, **options)


def _attend_window(
    inputs: StepInputs,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    distance: torch.Tensor,
    bias: torch.Tensor | None,
    seen: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Of slots at these distances, (B or 1, M)."""
    (left, right), chunk_size = inputs.window, inputs.chunk_size
    reach = seen if chunk_size is None else seen % chunk_size
    within: torch.Tensor | None = None  # all of them
    if inputs.layout == "by_rank":
        within = (distance >= -right) & (distance <= left)
    mask: torch.Tensor | None = _both(within, distance <= reach)
    empty = reach < -right if right else None
    if inputs.zero_kv_sink:  # what lies before the document's start is as good as a key and a value of zeros
        farthest = inputs.keys.shape[2] - (inputs.layout == "free")
        more = left - farthest  # distances for which there is no slot: within the document, they hold nothing
        if more > 0:
            beyond = torch.arange(left, farthest, -1, device=q.device).expand(distance.shape[0], -1)
            distance = torch.cat([beyond, distance], 1)
            within = None if within is None else F.pad(within, (more, 0), value=True)
            keys, values = (F.pad(part, (0, 0, more, 0)) for part in (keys, values))
        missing = distance > reach
        keys, values = (part.masked_fill(missing[:, None, :, None], 0.0) for part in (keys, values))
        mask, empty = within, None
        if more > 0:
            mask = _both(within, (distance <= farthest) | missing)
            empty = ~mask.any(1, keepdim=True)
    logits = None
    if bias is not None:
        logits = bias[:, distance.clamp(max=bias.shape[1] - 1)].transpose(0, 1).unsqueeze(2).to(q.dtype)
    return _attend_slots(q, keys, values, mask, empty, logits, **options)


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first & second


def _attend_slots(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    empty: torch.Tensor | None,
    logits: torch.Tensor | None = None,
    *,
    sink: Sink | None,
    scale: float,
) -> torch.Tensor:
    """q (B, H, 1, E), keys and values (B, G, M, e); mask (B, M) bool, logits (B or 1, H, 1, M); empty (B, 1): sees
    nothing."""
    if sink is not None:
        return _attend_slots_and_sink(q, keys, values, mask, logits, sink, scale)
    if mask is not None:
        # a softmax over nothing is not finite; such rows are overwritten below
        mask = (mask if empty is None else mask | empty)[:, None, None]
        logits = mask if logits is None else torch.where(mask, logits, float("-inf"))
    options: dict[str, Any] = {"attn_mask": logits, "scale": scale, "enable_gqa": bool(q.shape[1] != keys.shape[1])}
    y = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), **options)
    return y if empty is None else y.masked_fill(empty.view(-1, 1, 1, 1), 0.0)


def _attend_slots_and_sink(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    logits: torch.Tensor | None,
    sink: Sink,
    scale: float,
) -> torch.Tensor:
    """The same with a sink of logits (B, H, 1) beside the slots."""
    column = sink.logits.unsqueeze(3)
    logits = column.new_zeros(1, 1, 1, 1) if logits is None else logits
    logits = logits if mask is None else torch.where(mask[:, None, None], logits, float("-inf"))
    logits = torch.cat([logits.expand(*column.shape[:3], keys.shape[2]), column], -1)
    empty = logits.isneginf().all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0.0)
    keys, values = append_sink(keys.to(q.dtype), values.to(q.dtype), sink.values, q.shape[1])
    options: dict[str, Any] = {"attn_mask": logits, "scale": scale, "enable_gqa": bool(q.shape[1] != keys.shape[1])}
    y = F.scaled_dot_product_attention(q, keys, values, **options)
    return y.masked_fill(empty, 0.0)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) in float32 or wider, as the root-mean-square norm that it is."""
    size = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, (size,), eps=1e-6 / size) * size**-0.5
