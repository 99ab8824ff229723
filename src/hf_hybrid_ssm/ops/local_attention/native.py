"""The fused CPU backend: `native.c`, compiled on first use and called directly or through two custom ops."""

from collections.abc import Callable, Sequence
from typing import Any, List, NamedTuple  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, is_plain_call
from hf_hybrid_ssm.ops.core.native_library import (
    CFunction,
    contiguous,
    library_beside,
    prepared,
    supports,
    with_dense_rows,
)
from hf_hybrid_ssm.ops.local_attention.distance_range import UNLIMITED
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs
from hf_hybrid_ssm.ops.local_attention.torch_backend import local_attention_torch

__all__ = ["local_attention_native", "supports"]

_library = library_beside(__file__)
# T keys, the last L of them the row's own
_INPUTS = """q[B* H* L* E], k[B* G* T* E], v[B* G* T* V], bias?[H* R*], sink_logits?[B* H* L*], sink_values?[S V],
    seen?[B] int64, seq_idx?[B L] int64, lengths?[B] int64"""
_NUMBERS = """scale:float, q.0, q.1, q.2, k.0, k.1, k.2, v.0, v.1, v.2, bias.0, bias.1, sink_logits.0, sink_logits.1,
    sink_logits.2, left, right, chunk, zero_sink, B, H, G, L, T-L, E, V, R, S"""
FORWARD = CFunction(_library, "local_attention_forward", f"{_INPUTS}, y[B L H V], log_sums[B H L]", _NUMBERS)
BACKWARD = CFunction(
    _library,
    "local_attention_backward",
    f"""{_INPUTS}, y[B* H* L* V], dy[B* H* L* V], log_sums[B H L], dq[B L H E], dk[B T G E], dv[B T G V],
    dbias?[H R], dsink_logits?[B H L], dsink_values?[S V]""",
    f"{_NUMBERS}, y.0, y.1, y.2, dy.0, dy.1, dy.2",
)


def local_attention_native(inputs: AttentionInputs) -> Tensor:
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`; dropout and softcap run in torch."""
    if inputs.dropout or inputs.softcap is not None:
        return local_attention_torch(inputs)
    q, k, v, window, scale, bias, sink_logits, sink_values, chunk_size, zero_kv_sink, *_ = inputs
    seen, state = None, inputs.state
    if state is not None:
        k, v = torch.cat([state.keys.to(k.dtype), k], 2), torch.cat([state.values.to(v.dtype), v], 2)
        seen = contiguous(state.seen, torch.int64)
    left, right = (UNLIMITED if limit is None else limit for limit in window)
    counts = (contiguous(inputs.seq_idx, torch.int64), contiguous(inputs.lengths, torch.int64))
    bias, logits = (None if x is None else x.float() for x in (bias, sink_logits))
    q, k, v = with_dense_rows(q, k, v)
    numbers = [left, right, chunk_size or 0, int(zero_kv_sink)]
    dense = _Inputs(q, k, v, bias, logits, prepared(sink_values), seen, *counts, float(scale), numbers)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in dense[:6] if x is not None)
    run: Callable = (lambda given: _attention(*given)) if trains or not is_plain_call(inputs.q) else _forward
    return run(dense)[0].to(inputs.q.dtype)


class _Inputs(NamedTuple):
    """What C takes; the numbers are left, right, chunk (0: none), zero_sink.

    q (B, H, L, E), k (B, G, M + L, E) and v (B, G, M + L, V) are float32 with dense entries, bias (H, R) and the
    sink's logits (B, H, L) and values (S, V) float32; the last M tokens before the row come first among its keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink_logits: Tensor | None
    sink_values: Tensor | None
    seen: Tensor | None
    seq_idx: Tensor | None
    lengths: Tensor | None
    scale: float
    numbers: List[int]  # noqa: UP006 - all that torch 2.6 reads


def _empty(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    (batch, heads, length, _), size = inputs.q.shape, inputs.v.shape[3]
    return inputs.q.new_empty(batch, length, heads, size).transpose(1, 2), inputs.q.new_empty(batch, heads, length)


def _forward(inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """y (B, H, L, V), the logs of the summed weights (B, H, L)."""
    y, log_sums = _empty(inputs)
    FORWARD((*inputs[:9], y.transpose(1, 2), log_sums), inputs.scale, *inputs.numbers)
    return y, log_sums


def _zeros(x: Tensor) -> Tensor:
    """Zeros (B, H, L, E) that lie as (B, L, H, E), which maps before and after attention take without a copy; those of
    tables are dense."""
    if x.dim() < 4:
        return x.new_zeros(x.shape)
    batch, heads, length, size = x.shape
    return x.new_zeros(batch, length, heads, size).transpose(1, 2)


def _backward(
    inputs: _Inputs, gradients: Sequence[Tensor], needed: Sequence[bool], y: Tensor, log_sums: Tensor
) -> list[Tensor | None]:
    """Of q, k, v, bias, and the sink's logits and values."""
    found = [None if x is None else _zeros(x) for x in inputs[:6]]
    results = (None if x is None else x.transpose(1, 2) if x.dim() == 4 else x for x in found)
    of_y = with_dense_rows(y, gradients[0])
    BACKWARD((*inputs[:9], *of_y, log_sums.contiguous(), *results), inputs.scale, *inputs.numbers)
    return found


def _flops(shapes: Any) -> int:
    """A multiplication and an addition for each seen pair, in both products."""
    (batch, heads, length, size), (*_, num_keys, value_size) = shapes.q, shapes.v
    return 2 * batch * heads * _pairs(length, num_keys, shapes.numbers) * (size + value_size)


def _pairs(length: int, num_keys: int, numbers: Sequence[int]) -> int:
    """Queries times the keys that each sees, in one document; the last `length` of `held` keys are its own."""
    left, right, chunk, _ = numbers
    if chunk and length > chunk:
        return length // chunk * _pairs(chunk, chunk, numbers) + _pairs(length % chunk, length % chunk, numbers)
    return length + _limited(num_keys - length, length, left) + _limited(0, length, right)


def _limited(first: int, count: int, limit: int) -> int:
    """The sum of the numbers first, first + 1, ... first + count - 1, none above the limit."""
    below = min(max(limit - first, 0), count)
    return below * first + below * (below - 1) // 2 + (count - below) * limit


_attention = differentiable_op(
    "hf_hybrid_ssm::local_attention_native",
    _Inputs,
    _forward,
    _backward,
    _empty,
    saved=lambda inputs, outputs: (inputs, outputs),
    fake_gradient=_zeros,
    device_types="cpu",
    flops=_flops,
    backward_flops=lambda shapes: 2.5 * _flops(shapes),  # scores once more, then four products
)
