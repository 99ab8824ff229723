# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 7f83c0df7d214cdc5c5c0fbdea509901a2b8a695aad8e4287bbf6d0d79661a0a

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .dispatch import Op, attention, check_lengths, check_seq_idx, check_tensor, draw, is_transforming, zero_beyond


# ---- ops/local_attention/distance_range.py --------------------------------------------------------------------------
# Which keys a query sees: always an interval of distances d = i - j, cut per token by documents, chunks and
# padding.

Window = tuple[int | None, int | None]
"""(left, right): how many keys before and after itself a query sees; None for all."""


class AttentionState(NamedTuple):
    """What later tokens need of the earlier ones.

    Args:
        keys: (B, G, P, E), the last P keys, newest last.
        values: (B, G, P, V).
        seen: (B,) int64, tokens so far of the row's last document; min(seen, P) of the keys are its own, the rest of
            the slots hold anything.
    """

    keys: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor


class DistanceRange(NamedTuple):
    """Per token, the distances it may see: first ≤ d ≤ last, and its rank in its document; each (B or 1, L) int64."""

    first: torch.Tensor
    last: torch.Tensor
    rank: torch.Tensor


def distance_ranges(
    length: int,
    window: Window,
    chunk_size: int | None,
    *,
    seen: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    device: torch.device,
) -> DistanceRange:
    """The interval of each token. Counting a token's rank within its document makes one comparison serve the start of
    the row, the empty slots of a cache, the borders of documents, and the grid of chunks."""
    left, right = window
    position = torch.arange(length, device=device).unsqueeze(0)
    rank, end = position, None
    if seen is not None:
        rank = rank + seen.unsqueeze(1)
    if seq_idx is not None:
        is_start = torch.ones_like(seq_idx, dtype=torch.bool)
        is_start[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        start = torch.where(is_start, position, 0).cummax(1).values
        rank = torch.where(start == 0, rank, position - start)
        later_start = torch.where(is_start, position, length).flip(1).cummin(1).values.flip(1)  # at or after i
        end = torch.cat([later_start[:, 1:], torch.full_like(later_start[:, :1], length)], 1)
    last = rank if left is None else rank.clamp(max=left)
    if right is not None and right <= 0:
        first = torch.full_like(position, -right)
    else:
        stop = torch.full_like(position, length) if end is None else end
        if lengths is not None:
            stop = torch.minimum(stop, lengths.unsqueeze(1))
        first = (position + 1 - stop).clamp(max=0)  # minus the tokens that follow in the document
        first = first if right is None else first.clamp(min=-right)
    if chunk_size is not None:
        offset = rank % chunk_size
        first, last = torch.maximum(first, offset + 1 - chunk_size), torch.minimum(last, offset)
    return DistanceRange(first, last, rank)


def bias_by_distance(bias: torch.Tensor, distance: torch.Tensor, two_sided: bool) -> torch.Tensor:
    """(H, ...) the bias of each distance; distances beyond the table take its last (two-sided: outermost) value."""
    column = distance + bias.shape[1] // 2 if two_sided else distance
    return bias[:, column.clamp(0, bias.shape[1] - 1)]


def zero_key_logits(bias: torch.Tensor | None, rank: torch.Tensor, left: int, right: int, like: torch.Tensor):
    """Log of the summed weights of the zero keys before the document's start, (B or 1, H or 1, L).

    A token of rank p misses the distances p+1 … left; each holds a zero key, of logit bias(d) alone.
    """
    distance = torch.arange(-right, left + 1, device=rank.device)
    logits = (
        like.new_zeros(1, len(distance)) if bias is None else bias_by_distance(bias, distance, False).to(like.dtype)
    )
    missing = logits.flip(1).logcumsumexp(1).flip(1)  # column c: distances c - right … left
    missing = torch.cat([missing, torch.full_like(missing[:, :1], float("-inf"))], 1)
    column = (rank + 1 + right).clamp(0, len(distance))
    return missing[:, column].transpose(0, 1)


def append_to_window(
    state: AttentionState | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    capacity: int | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> AttentionState:
    """The state after these keys and values (B, G, L, ...): the last `capacity` of [state ; keys], or all if None.

    What `local_attention` returns as its final state, without the attention.
    """
    batch, _, length, _ = keys.shape
    held = 0 if state is None else state.keys.shape[2]
    capacity = held + length if capacity is None else capacity
    count = keys.new_full((batch,), length, dtype=torch.int64) if lengths is None else lengths.long()
    seen = count if state is None else count + state.seen
    if seq_idx is not None and length > 0:
        last_column = (count - 1).clamp(min=0).unsqueeze(1)
        last = seq_idx.gather(1, last_column)
        column = torch.arange(length, device=keys.device)
        in_last = ((seq_idx == last) & (column < count.unsqueeze(1))).sum(1)
        seen = torch.where(last.squeeze(1) == seq_idx[:, 0], seen, in_last)

    def newest(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        joined = new if old is None else torch.cat([old.to(new.dtype), new], 2)
        total = joined.shape[2]
        if total < capacity:
            joined = torch.nn.functional.pad(joined, (0, 0, capacity - total, 0))
            total = capacity
        if lengths is None:
            return joined[:, :, total - capacity :]
        column = total - length - capacity + count.unsqueeze(1) + torch.arange(capacity, device=new.device)
        column = column[:, None, :, None]
        kept = joined.gather(2, column.clamp(min=0).expand(-1, joined.shape[1], -1, joined.shape[3]))
        return torch.where(column >= 0, kept, 0.0)  # before the first token: column 0 may be padding, and NaN

    old_keys, old_values = (None, None) if state is None else (state.keys, state.values)
    return AttentionState(newest(old_keys, keys), newest(old_values, values), seen)


# ---- ops/local_attention/biased.py ----------------------------------------------------------------------------------
# Attention with a learned bias through torch's fused CPU kernel, which has no gradient for a mask.
#
# Left to itself, torch falls back to the equation and holds all probabilities of all blocks, several times over. Here
# the bias's gradient is recomputed block by block from the log-sum-exp that the kernel returns.

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# logits of one slice of the gradient's recomputation; a few of them fit the second-level cache
_SLICE = 2**19


def can_use_cpu_flash_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, dropout: float
) -> bool:
    """Whether `biased_attention` can and should take over from `scaled_dot_product_attention`."""
    if bias is None or dropout or torch.compiler.is_compiling() or q.device.type != "cpu" or is_transforming():
        return False
    same_heads, same_size = q.shape[1] == k.shape[1], q.shape[3] == v.shape[3]
    return bias.requires_grad and torch.is_grad_enabled() and same_heads and same_size and q.numel() > 0


def biased_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale q kᵀ + mask) v.

    Args:
        q: (R, H, Q, E).
        k, v: (R, H, K, E).
        mask: (R or 1, H, Q, K) in q's dtype, with a gradient; -inf for a key that a query does not see, but not for
            all of its keys.

    Returns:
        (R, H, Q, E).
    """
    return _BiasedAttention.apply(q, k, v, mask, scale)


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, mask, scale):
        y, logsumexp = _FORWARD(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, y, logsumexp)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        q, k, v, mask, y, logsumexp = ctx.saved_tensors
        grads = _BACKWARD(grad, q, k, v, y, logsumexp, 0.0, False, attn_mask=mask, scale=ctx.scale)
        shift = (grad * y).sum(-1, keepdim=True)
        total = torch.zeros_like(mask)
        rows = max(1, _SLICE // mask[0].numel())
        for begin in range(0, q.shape[0], rows):
            part = slice(begin, begin + rows)
            of_part = slice(None) if mask.shape[0] == 1 else part
            logits = (q[part] * ctx.scale) @ k[part].transpose(2, 3)
            weights = logits.add_(mask[of_part]).sub_(logsumexp[part].unsqueeze(-1)).exp_()
            change = (grad[part] @ v[part].transpose(2, 3)).sub_(shift[part]).mul_(weights)
            total[of_part] += change.sum(0, keepdim=True) if mask.shape[0] == 1 else change
        return *grads, total, None


# ---- ops/local_attention/reference.py -------------------------------------------------------------------------------
# Local attention, token by token: a softmax over the list of keys that a token may see.

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


def attention_step_reference(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.local_attention.attention_step`; computes in the same precision."""
    dtype, output_dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    if head_scale is not None:
        factor = head_scale.abs().to(dtype).unsqueeze(1)
        q, k = _reference_normalised(q, dtype) * factor, None if k is None else _reference_normalised(k, dtype)
        bias = None if bias is None else bias * factor
    y = torch.zeros(*q.shape[:2], values.shape[3], dtype=dtype)
    heads, shared = q.shape[1], q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        own = None if k is None else (k[b], v[b])
        rank = 0 if seen is None else int(seen[b])
        logits, seen_values = [], []
        for key, value, distance in _visible(keys[b], values[b], own, rank, window, chunk_size, block, shift):
            product = (q[b].to(dtype) * key.repeat_interleave(shared, 0).to(dtype)).sum(-1)
            logits.append(product * scale + _bias(bias, distance, False, heads, dtype))
            seen_values.append(value.repeat_interleave(shared, 0).to(dtype))
        for distance in range(max(-window[1], rank + 1), window[0] + 1) if zero_kv_sink else ():
            logits.append(_bias(bias, distance, False, heads, dtype))
            seen_values.append(torch.zeros_like(y[b]))
        if logits:
            y[b] = (torch.stack(logits).softmax(0).unsqueeze(-1) * torch.stack(seen_values)).sum(0)
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


def _reference_normalised(x, dtype):
    x = x.to(dtype)
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def step_self_check_inputs() -> dict:
    """Shared keys, a row at its start, entries that do not fill a vector."""
    shapes: dict[str, tuple[int, ...]] = {"q": (2, 4, 18), "k": (2, 2, 18), "v": (2, 2, 5)}
    options = {"window": (6, -1), "chunk_size": None, "block": False, "scale": 1.0, "zero_kv_sink": True}
    shapes |= {"keys": (2, 2, 7, 18), "values": (2, 2, 7, 5), "bias": (4, 5), "head_scale": (4,)}
    return draw(shapes) | options | {"seen": torch.tensor([3, 40]), "shift": False}


# ---- ops/local_attention/uniform.py ---------------------------------------------------------------------------------
# Causal attention within a window or a chunk where every block of queries has the same mask.
#
# So it is in rows of one document each, read from their start: only the first block lacks the keys before it. With the
# zero sink even that block is like the others, for the zeros that fill its window are the sink.

def has_uniform_blocks(q, k, *, window, chunk_size, zero_kv_sink, state, seq_idx) -> bool:
    """Whether `uniform_attention` can run these arguments of `local_attention`, and wastes little on a short row."""
    (left, right), length = window, q.shape[2]
    if state is not None or seq_idx is not None or left is None or right is None or right > 0:
        return False
    if chunk_size is not None:
        return right == 0 and left == chunk_size - 1
    return left <= 2 * length if zero_kv_sink else right == 0


def uniform_attention(q, k, v, *, left, right, chunk_size, bias, scale, zero_kv_sink, dropout):
    """`local_attention` of q (B, H, L, E), k (B, G, L, E), v (B, G, L, V), where `has_uniform_blocks`."""
    length = q.shape[2]
    if chunk_size is None and not zero_kv_sink:
        left = min(left, length - 1)
    size = chunk_size or max(left, 16)
    if chunk_size is None and length % size and length % (left + 1) == 0 and left >= 16:
        size = left + 1  # a window of W tokens that counts the query: rows are more often multiples of W
    size = min(size, length)
    if _runs_by_equation(q, k, dropout) and scale != 1.0:
        q, scale = q * scale, 1.0
    count = -(-length // size)
    gap = count * size - length
    queries = _padded(q, 0, gap).unflatten(2, (count, size))
    core = None if bias is None else _core_of(bias, left, right)
    options = {"scale": scale, "dropout": dropout}
    if chunk_size is not None:
        mask = _mask(core, left, right, size, 0, size, q)
        keys, values = (_padded(x, 0, gap).unflatten(2, (count, size)).mT for x in (k, v))
        y = _uniform_attend(queries, keys, values, mask, **options)
    elif zero_kv_sink or _runs_by_equation(q, k, dropout):
        width = size + left + right
        mask = _mask(core, left, right, size, left, width, q)
        keys, values = (_padded(x, left, gap + right).unfold(2, width, size) for x in (k, v))
        absent = None
        if not zero_kv_sink:  # size ≥ left: only the first block reaches before the row
            absent = q.new_zeros(count, 1, width)
            absent[0, :, :left] = -math.inf
        y = _uniform_attend(queries, keys, values, mask, absent, **options)
    else:
        y = _attend_from_start(queries, _padded(k, 0, gap), _padded(v, 0, gap), core, left, **options)
    return y.flatten(2, 3)[:, :, :length]


def _attend_from_start(queries, k, v, core, left, *, scale, dropout):
    """A window that ends with the token itself, without a sink: the first block has its own keys only."""
    count, size = queries.shape[2:4]
    mask = _mask(core, left, 0, size, left, size + left, queries)
    first, others = queries.split([1, count - 1], 2)
    keys, values = (x[:, :, :size].unsqueeze(2).mT for x in (k, v))
    blocks = [_uniform_attend(first, keys, values, mask[..., left:], scale=scale, dropout=dropout)]
    if count > 1:
        skipped = size - left  # of a block that is longer than the window
        keys, values = (x[:, :, skipped:].unfold(2, size + left, size) for x in (k, v))
        blocks.append(_uniform_attend(others, keys, values, mask, scale=scale, dropout=dropout))
    return torch.cat(blocks, 2) if count > 1 else blocks[0]


def _runs_by_equation(q: torch.Tensor, k: torch.Tensor, dropout: float) -> bool:
    """Whether torch's attention would fall back to products and a softmax, which then need no detour through it."""
    return dropout > 0 and q.device.type == "cpu" and q.shape[1] == k.shape[1]


def _padded(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """x (B, H, L, E) with zeros around it."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def _core_of(bias: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """(H, left + right + 1) the bias of each distance in the window; the table (H, R) may end earlier or later."""
    missing = left + 1 - bias.shape[1]
    if missing > 0:
        bias = torch.cat([bias, bias[:, -1:].expand(-1, missing)], 1)
    return bias[:, -right : left + 1]


def _mask(
    core: torch.Tensor | None, left: int, right: int, size: int, before: int, width: int, like: torch.Tensor
) -> torch.Tensor:
    """(H or 1, size, width) the bias of query i and key j, at distance i - j + before, or -inf beyond the window."""
    if core is None:
        core = like.new_zeros(1, left + right + 1)
    nearer, farther = width - 1 - before - right, size - 1 + before - left
    core = F.pad(core.to(like.dtype), (nearer, farther), value=-math.inf)  # from the smallest distance to the largest
    return core.unfold(1, width, 1).flip(2)


def _uniform_attend(q, k, v, mask, absent=None, *, scale, dropout):
    """softmax(scale q kᵀ + mask) v of blocks q (B, H, n, Q, E), k (B, G, n, E, K), v (B, G, n, V, K).

    By equation, q is scaled already, and absent (n, 1, K) may be added too.
    """
    batch, heads, count = q.shape[:3]
    if _runs_by_equation(q, k, dropout):
        logits = torch.matmul(q, k) + mask.unsqueeze(1)
        logits = logits if absent is None else logits + absent
        return torch.matmul(F.dropout(logits.softmax(-1), dropout), v.mT)
    rows = (q, k.mT, v.mT)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in rows)
    mask = mask.unsqueeze(0)
    if can_use_cpu_flash_with_bias(q, k, v, mask, dropout):
        y = biased_attention(q, k, v, mask, scale)
    else:
        y = attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=heads != k.shape[1])
    return y.unflatten(0, (batch, count)).transpose(1, 2)


# ---- ops/local_attention/torch_backend.py ---------------------------------------------------------------------------
# Local attention in torch: blocks of queries against the keys of their windows, by torch's fused attention.

def local_attention_torch(q, k, v, *, window, chunk_size, bias, scale, zero_kv_sink, dropout, state, seq_idx, lengths):
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`."""
    (left, right), length = window, q.shape[2]
    seen = None if state is None else state.seen
    uniform = {"chunk_size": chunk_size, "zero_kv_sink": zero_kv_sink}
    if has_uniform_blocks(q, k, window=window, state=state, seq_idx=seq_idx, **uniform):
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
        sink = zero_key_logits(bias, ranges.rank, left, right, q.new_empty(0, dtype=dtype))
    inputs = (q.to(dtype), k.to(dtype), v.to(dtype))
    options = {"bias": bias, "two_sided": two_sided, "sink": sink, "scale": scale, "dropout": dropout}
    span = None if left is None or right is None else max(left + right, 16)
    is_plain = state is None and seq_idx is None and lengths is None and not zero_kv_sink
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
    sink = None if sink is None else sink.unsqueeze(-1)
    return _torch_backend_attend(q, k, v, allowed.unsqueeze(1), logits, sink, scale, dropout)


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
    shared = ((distance >= -window[1]) & (distance <= window[0]))[None, None]
    outputs = []
    for index, (queries, keys, values, low, high, sinks) in enumerate(parts):
        if pieces[index] == 0:
            continue
        allowed = shared
        if index != 1:
            allowed = ((distance >= low) & (distance <= high)).expand(batch, -1, -1, -1).reshape(-1, 1, size, width)
            sinks = None if sinks is None else sinks.expand(batch, *(-1,) * 4).flatten(0, 1)
        queries, keys, values = queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1)
        y = _torch_backend_attend(queries, keys, values, allowed, logits, sinks, scale, dropout)
        outputs.append(y.unflatten(0, (batch, pieces[index])))
    y = torch.cat(outputs, 1)
    return y.transpose(1, 2).reshape(batch, heads, count * size, -1)[:, :, :length]


def _torch_backend_attend(q, k, v, allowed, logits, sink, scale, dropout):
    """softmax(q k^T scale + logits) v over the allowed keys, and 0 where there is none.

    `allowed` (R or 1, 1, Q, K) bool, `logits` (1, H, Q, K) or None, `sink` (R or 1, H or 1, Q, 1) or None: the logit
    of one more key whose value is 0.
    """
    mask, empty = allowed, None
    if sink is None:
        empty = ~allowed.any(-1, keepdim=True)
        mask = allowed | empty  # a softmax over nothing is not finite; such rows are overwritten below
        if can_use_cpu_flash_with_bias(q, k, v, logits, dropout):
            mask = torch.where(mask, logits.to(q.dtype), float("-inf"))
            return torch.where(empty, 0.0, biased_attention(q, k, v, mask, scale))
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


def attention_step_torch(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.local_attention.attention_step`."""
    dtype = q.dtype if q.dtype == torch.float64 or q.device.type != "cpu" else torch.float32
    output_dtype, q = q.dtype, q.to(dtype)
    if head_scale is not None:
        factor = head_scale.abs().unsqueeze(1).to(torch.promote_types(dtype, torch.float32))
        q, k = (_torch_backend_normalised(q) * factor).to(dtype), None if k is None else _torch_backend_normalised(k)
        bias = None if bias is None else bias * factor
    options = {"scale": scale, "enable_gqa": q.shape[1] != keys.shape[1]}
    if k is None:
        y = _attend_slots(q, keys, values, None, None, **options)
    elif block:
        slot = (seen % keys.shape[2]).unsqueeze(1)
        for held, new in ((keys, k), (values, v)):
            index = slot.view(-1, 1, 1, 1).expand(-1, held.shape[1], 1, held.shape[3])
            held.scatter_(2, index, new.to(held.dtype).unsqueeze(2))
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
        missing, mask, empty = ~mask[:, None, :, None], None, None
        keys, values = keys.masked_fill(missing, 0.0), values.masked_fill(missing, 0.0)
    logits = None if bias is None else bias[:, distance.clamp(max=bias.shape[1] - 1)].unsqueeze(1).to(q.dtype)
    return _attend_slots(q, keys, values, mask, empty, logits, **options)


def _attend_slots(q, keys, values, mask, empty, logits=None, **options):
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


def _torch_backend_normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) in float32 or wider, as the root-mean-square norm that it is."""
    size = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, (size,), eps=1e-6 / size) * size**-0.5


# ---- ops/local_attention/step.py ------------------------------------------------------------------------------------
# Attention of one token to held keys and values, in decoding: what is held is overwritten, nothing has a gradient.

_STEP_OP = Op(
    "attention_step",
    builtin={"torch": attention_step_torch, "reference": attention_step_reference},
    kernels={},
    self_check_inputs=step_self_check_inputs,
    differentiable=False,
)


def attention_step(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None = None,
    *,
    window: tuple[int | None, int] = (None, 0),
    chunk_size: int | None = None,
    block: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    head_scale: torch.Tensor | None = None,
    zero_kv_sink: bool = False,
    shift: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    r"""`local_attention` of one token of each row: y = Σ_j softmax_j( scale · q·k_j + bias(i - j) ) v_j.

    Its own key and value are put among the held ones, in place. The M slots hold, newest last, the keys before it: in
    all of them, and then they move up by one (`shift`), or in all but the last one, which is free. With `block`, they
    are those of a block of M tokens instead: token i has slot i mod M, sees the slots 0 .. i mod M, and the block's
    last token leaves zeros. Without k and v, the token sees all slots, and nothing is kept.

    Args:
        q: (B, H, E).
        k, v: (B, G, E) and (B, G, V), or None; H / G heads in a row share keys and values.
        keys, values: (B, G, M, E) and (B, G, M, V), entries dense.
        seen: (B,) int64, tokens so far of the row's document, this one not included.
        window: (left, right) with right ≤ 0: the distances it sees are -right .. left; None for all. (0 or -1 with
            `block`.)
        chunk_size: C, it sees only tokens of its chunk, floor(i / C).
        bias: (H, R), by distance, added to the logits; distances beyond the table take its last value.
        scale: of q·k; E**-0.5 by default.
        head_scale: (H,): first q and k are L2-normalised (x / sqrt(x·x + 1e-6)); q and bias are multiplied by its
            absolute value.
        zero_kv_sink: distances that reach before the document's start hold keys and values that are 0.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, H, V) in the dtype of q, 0 where a token sees nothing.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("q", q, (None, None, None), "B, H, E")
    batch, heads, size = q.shape
    check_tensor("keys", keys, (batch, None, None, size), "B, G, M, E")
    groups, slots = keys.shape[1:3]
    check_tensor("values", values, (batch, groups, slots, None), "B, G, M, V", like=keys)
    if k is not None:
        check_tensor("k", k, (batch, groups, size), "B, G, E", like=q)
        check_tensor("v", v, (batch, groups, values.shape[3]), "B, G, V", like=q)
        check_tensor("seen", seen, (batch,), "B")
    if heads % groups:
        raise ValueError(f"q must have a multiple of the {groups} heads of keys, got {heads}.")
    if window[1] > 0:
        raise ValueError(f"window={window} looks ahead of the token: right must be at most 0.")
    run = _STEP_OP.select(q.device.type, keys.dtype, backend)
    options = {"window": window, "chunk_size": chunk_size, "block": block, "bias": bias, "head_scale": head_scale}
    options |= {"scale": size**-0.5 if scale is None else scale, "zero_kv_sink": zero_kv_sink, "shift": shift}
    return run(q, k, v, keys, values, seen, **options)[0]


def window_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: AttentionState, *, keeps_address: bool, **options: Any
) -> tuple[torch.Tensor, AttentionState]:
    """`attention_step` from a state of `local_attention` to the next one, which overwrites it.

    Args:
        keeps_address: the keys stay where they are, and move up by one; otherwise they may lie in a longer buffer, and
            the window moves along it.
        options: of `attention_step`.
    """
    keys, values, seen = state
    if keeps_address and keys.shape[2] > 0:
        y = attention_step(q, k, v, keys, values, seen, shift=True, **options)
        return y, AttentionState(keys, values, seen + 1)
    wide = with_free_slot(keys), with_free_slot(values)
    y = attention_step(q, k, v, *wide, seen, **options)
    if options["window"][0] is not None:
        wide = shifted(wide[0]), shifted(wide[1])
    return y, AttentionState(*wide, seen + 1)


def with_free_slot(held: torch.Tensor) -> torch.Tensor:
    """(..., P, e) → (..., P + 1, e), the same and one slot more, whose content is anything.

    A window of slots moves along a buffer that has a quarter more of them, so that a new token moves no other; where
    they are used up, the window is copied to the front of a new buffer. Only a caller that owns what is held may do
    this: the slots after a window are not those of an older copy of it.
    """
    if torch.compiler.is_compiling():
        return torch.nn.functional.pad(held, (0, 0, 0, 1))
    free, slots = getattr(held, "_free_slots", 0), held.shape[-2]
    if free == 0:
        free = max(16, slots // 4)
        buffer = held.new_empty(*held.shape[:-2], slots + free, held.shape[-1])
        buffer.narrow(-2, 0, slots).copy_(held)
        held = buffer.narrow(-2, 0, slots)
    wide = held.as_strided((*held.shape[:-2], slots + 1, held.shape[-1]), held.stride(), held.storage_offset())
    wide._free_slots = free - 1  # type: ignore[attr-defined]
    return wide


def shifted(wide: torch.Tensor) -> torch.Tensor:
    """(..., P + 1, e) → (..., P, e) without the oldest slot."""
    held = wide.narrow(-2, 1, wide.shape[-2] - 1)
    if not torch.compiler.is_compiling():
        held._free_slots = wide._free_slots  # type: ignore[attr-defined]
    return held


# ---- ops/local_attention/__init__.py --------------------------------------------------------------------------------
# Attention within a window or a chunk, linear in the length of the sequence.

_LOCAL_ATTENTION_OP = Op(
    "local_attention",
    builtin={"torch": local_attention_torch, "reference": local_attention_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.local_attention_triton"},
    self_check_inputs=self_check_inputs,
)


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: Window,
    chunk_size: int | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    zero_kv_sink: bool = False,
    dropout: float = 0.0,
    initial_state: AttentionState | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    capacity: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, AttentionState | None]:
    r"""y_i = Σ_j softmax_j( scale · q_i·k_j + bias(i - j) ) v_j over the keys with i - left ≤ j ≤ i + right.

    Token i sees token j if j lies in its window, both are real tokens of the same document, and, with `chunk_size` C,
    floor(i/C) = floor(j/C) counted from the document's start. A token that sees no key gets 0.

    Args:
        q, k, v: (B, H, L, E), (B, G, L, E), (B, G, L, V), one dtype; H / G heads in a row share keys and values.
        window: (left, right), the number of keys before and after the query that it sees, as in flash-attention but
            with None for "all". right = 0 is causal, right = -1 causal without the token itself. transformers'
            `sliding_window=W` is (W - 1, 0). With left = None time and memory are quadratic.
        chunk_size: C.
        bias: (H, R), added to the logits. Causal: column c belongs to distance c. Two-sided: R is odd, the middle
            column is distance 0, columns right of it look back. Distances beyond the table take its outermost value.
        scale: of q·k; E**-0.5 by default.
        zero_kv_sink: the distances that reach before the document's start hold keys and values that are 0
            (they take a share of the softmax); otherwise they hold nothing. Causal windows only.
        dropout: on the softmax.
        initial_state: what an earlier call returned: its keys come before the row's first token, as part of the row's
            first document.
        seq_idx: (B, L) int, documents of a packed row.
        lengths: (B,) int, real tokens at the front of each row; outputs after them are meaningless but finite, and
            the final state is the one after them.
        return_final_state: also return what the next tokens need.
        capacity: number of keys the final state holds, at least what the window needs (the default); with left = None
            the default is to hold all.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, H, L, V) in the dtype of q, and the final state or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or options that contradict each
            other.
    """
    check_tensor("q", q, (None, None, None, None), "B, H, L, E")
    batch, heads, length, size = q.shape
    check_tensor("k", k, (batch, None, length, size), "B, G, L, E", like=q)
    check_tensor("v", v, (batch, k.shape[1], length, None), "B, G, L, V", like=q)
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {heads}.")
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    _check_window(window, chunk_size, zero_kv_sink)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must lie in [0, 1).")
    if chunk_size is not None:
        window = _within_chunk(window, chunk_size)
    left, right = window
    two_sided = right is None or right > 0
    check_tensor("bias", bias, (heads, None), "H, R", optional=True)
    if bias is not None and two_sided and bias.shape[1] % 2 == 0:
        raise ValueError(f"bias of two-sided attention must have an odd number of distances, got {bias.shape[1]}.")
    if two_sided and (initial_state is not None or return_final_state):
        raise ValueError(f"window={window} looks ahead: such attention has no state to start from or to return.")
    if capacity is not None and left is not None and capacity < left:
        raise ValueError(f"capacity={capacity} is too small: the window needs the last {left} keys.")
    capacity = capacity if capacity is not None else left
    if initial_state is not None:
        initial_state = _check_state(initial_state, k, v, left)
    run = _LOCAL_ATTENTION_OP.select(q.device.type, q.dtype, backend)
    y = run(
        q,
        k,
        v,
        window=window,
        chunk_size=chunk_size,
        bias=bias,
        scale=size**-0.5 if scale is None else scale,
        zero_kv_sink=zero_kv_sink,
        dropout=dropout,
        state=initial_state,
        seq_idx=seq_idx,
        lengths=lengths,
    )
    final = append_to_window(initial_state, k, v, capacity, seq_idx, lengths) if return_final_state else None
    return y, final


def empty_state(
    batch: int,
    heads: int,
    capacity: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionState:
    """The state before the first token, of `capacity` slots (the window's left, or `chunk_size` - 1)."""
    keys = torch.zeros(batch, heads, capacity, head_dim, device=device, dtype=dtype)
    values = keys if value_dim is None else torch.zeros(batch, heads, capacity, value_dim, device=device, dtype=dtype)
    return AttentionState(keys, values.clone(), torch.zeros(batch, dtype=torch.int64, device=device))


def _check_window(window: Window, chunk_size: int | None, zero_kv_sink: bool) -> None:
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window must be a pair (left, right), got {window!r}.")
    left, right = window
    if left is not None and (left < 0 or (right is not None and left < -right)):
        raise ValueError(f"window={window}: left must be at least 0, and at least -right.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    if zero_kv_sink and (right is None or right > 0 or left is None or chunk_size is not None):
        raise ValueError(
            "zero_kv_sink needs a causal window, (left, right) with a finite left and right ≤ 0, and no chunk_size; "
            f"got window={window}, chunk_size={chunk_size}."
        )


def _within_chunk(window: Window, chunk_size: int) -> tuple[int, int]:
    """The window that a chunk leaves; if it leaves none, the key at -right alone, which no token then sees."""
    left, right = (chunk_size - 1 if limit is None else min(limit, chunk_size - 1) for limit in window)
    return max(left, -right), right


def _check_state(state: AttentionState, k: torch.Tensor, v: torch.Tensor, needed: int | None) -> AttentionState:
    """The state with exactly the keys that the window needs."""
    batch, heads, _, size = k.shape
    check_tensor("initial_state.keys", state.keys, (batch, heads, None, size), "B, G, P, E")
    held = state.keys.shape[2]
    check_tensor("initial_state.values", state.values, (batch, heads, held, v.shape[3]), "B, G, P, V")
    check_tensor("initial_state.seen", state.seen, (batch,), "B")
    if needed is None or held == needed:
        return state
    if held < needed:
        raise ValueError(f"initial_state holds {held} keys, but the window needs the last {needed}.")
    return AttentionState(state.keys[:, :, held - needed :], state.values[:, :, held - needed :], state.seen)
