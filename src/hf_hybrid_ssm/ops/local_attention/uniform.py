"""Causal attention within a window or a chunk where every block of queries has the same mask.

So it is in rows of one document each, read from their start: only the first block lacks the keys before it. With the
zero sink even that block is like the others, for the zeros that fill its window are the sink.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.full_attention import attention
from hf_hybrid_ssm.ops.local_attention.biased import biased_attention, can_use_cpu_flash_with_bias
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs


def has_uniform_blocks(inputs: AttentionInputs) -> bool:
    """Whether `uniform_attention` can run these, and wastes little on a short row."""
    (left, right), length, chunk_size = inputs.window, inputs.length, inputs.chunk_size
    if inputs.softcap is not None or inputs.sink_logits is not None:
        return False
    if not inputs.is_new or left is None or right is None or right > 0 or length == 0:
        return False
    if chunk_size is not None:
        return right == 0 and left == chunk_size - 1
    return left <= 2 * length if inputs.zero_kv_sink else right == 0


def uniform_attention(inputs: AttentionInputs) -> torch.Tensor:
    """`local_attention`, where `has_uniform_blocks`."""
    q, k, v, (left, right), scale, bias, *_ = inputs
    chunk_size, zero_kv_sink, dropout = inputs.chunk_size, inputs.zero_kv_sink, inputs.dropout
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
    options: dict[str, Any] = {"scale": scale, "dropout": dropout}
    if chunk_size is not None:
        mask = _mask(core, left, right, size, 0, size, q)
        keys, values = (_padded(x, 0, gap).unflatten(2, (count, size)).mT for x in (k, v))
        y = _attend(queries, keys, values, mask, **options)
    elif zero_kv_sink or _runs_by_equation(q, k, dropout):
        width = size + left + right
        mask = _mask(core, left, right, size, left, width, q)
        keys, values = (_padded(x, left, gap + right).unfold(2, width, size) for x in (k, v))
        absent = None
        if not zero_kv_sink:  # size ≥ left: only the first block reaches before the row
            absent = q.new_zeros(count, 1, width)
            absent[0, :, :left] = -math.inf
        y = _attend(queries, keys, values, mask, absent, **options)
    else:
        y = _attend_from_start(queries, _padded(k, 0, gap), _padded(v, 0, gap), core, left, **options)
    return y.flatten(2, 3)[:, :, :length]


def _attend_from_start(
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    core: torch.Tensor | None,
    left: int,
    *,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """A window that ends with the token itself, without a sink: the first block has its own keys only."""
    count, size = queries.shape[2:4]
    mask = _mask(core, left, 0, size, left, size + left, queries)
    first, others = queries.split([1, count - 1], 2)
    keys, values = (x[:, :, :size].unsqueeze(2).mT for x in (k, v))
    blocks = [_attend(first, keys, values, mask[..., left:], scale=scale, dropout=dropout)]
    if count > 1:
        skipped = size - left  # of a block that is longer than the window
        keys, values = (x[:, :, skipped:].unfold(2, size + left, size) for x in (k, v))
        blocks.append(_attend(others, keys, values, mask, scale=scale, dropout=dropout))
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


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    absent: torch.Tensor | None = None,
    *,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    """softmax(scale q kᵀ + mask) v of blocks q (B, H, n, Q, E), k (B, G, n, E, K), v (B, G, n, V, K).

    By equation, q is scaled already, and absent (n, 1, K) may be added too.
    """
    batch, heads, count = q.shape[:3]
    if _runs_by_equation(q, k, dropout):
        logits = torch.matmul(q, k) + mask.unsqueeze(1)
        logits = logits if absent is None else logits + absent
        return torch.matmul(F.dropout(logits.softmax(-1), dropout), v.mT)
    operands = (q, k.mT, v.mT)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in operands)
    mask = mask.unsqueeze(0)
    if can_use_cpu_flash_with_bias(q, k, v, mask, dropout):
        y = biased_attention(q, k, v, mask, scale)
    else:
        grouped = bool(heads != k.shape[1])  # sizes of a trace may be symbolic
        y = attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)
    return y.unflatten(0, (batch, count)).transpose(1, 2)
