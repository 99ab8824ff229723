"""The fused CPU backend: `native.c`, compiled on first use and called directly or through two custom ops."""

from collections.abc import Callable, Sequence
from typing import Any, List  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.custom_ops import count_flops
from hf_hybrid_ssm.ops.core.native_library import (
    contiguous,
    is_plain_call,
    library_beside,
    prepared,
    supports,
    with_dense_rows,
)
from hf_hybrid_ssm.ops.core.second_derivatives import register_refusal
from hf_hybrid_ssm.ops.local_attention.distance_range import UNLIMITED, AttentionState, Limits
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


def local_attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: Limits,
    chunk_size: int | None,
    bias: Tensor | None,
    scale: float,
    zero_kv_sink: bool,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    dropout: float,
    state: AttentionState | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    softcap: float | None = None,
) -> Tensor:
    """See `hf_hybrid_ssm.ops.local_attention.local_attention`; dropout and softcap run in torch."""
    if dropout or softcap is not None:
        options: dict[str, Any] = {"window": window, "chunk_size": chunk_size, "bias": bias, "scale": scale}
        options |= {"dropout": dropout, "zero_kv_sink": zero_kv_sink, "state": state, "seq_idx": seq_idx}
        options |= {"lengths": lengths, "sink_logits": sink_logits, "sink_values": sink_values, "softcap": softcap}
        return local_attention_torch(q, k, v, **options)
    seen = None
    if state is not None:
        k, v = torch.cat([state.keys.to(k.dtype), k], 2), torch.cat([state.values.to(v.dtype), v], 2)
        seen = contiguous(state.seen, torch.int64)
    left, right = (UNLIMITED if limit is None else limit for limit in window)
    numbers = (left, right, chunk_size or 0, int(zero_kv_sink))
    counts = (contiguous(seq_idx, torch.int64), contiguous(lengths, torch.int64))
    tables = (None if x is None else x.float() for x in (bias, sink_logits))
    inputs = (*with_dense_rows(q, k, v), *tables, prepared(sink_values), seen, *counts)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:6] if x is not None)
    run: Callable = _forward if trains or not is_plain_call(q) else _compute_forward
    return run(*inputs, float(scale), numbers)[0].to(q.dtype)


def _zeros_by_token(x: Tensor) -> Tensor:
    """Zeros (B, H, L, E) that lie as (B, L, H, E), which maps before and after attention take without a copy."""
    batch, heads, length, size = x.shape
    return x.new_zeros(batch, length, heads, size).transpose(1, 2)


def _compute_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    seen: Tensor | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    numbers: List[int],  # noqa: UP006 - all that torch 2.6 reads
) -> tuple[Tensor, Tensor]:
    """y (B, H, L, V), the logs of the summed weights (B, H, L); numbers are left, right, chunk (0: none), zero_sink.

    q (B, H, L, E), k (B, G, M + L, E) and v (B, G, M + L, V) are float32 with dense entries, bias (H, R) and the
    sink's logits (B, H, L) and values (S, V) float32; the last M tokens before the row come first among its keys.
    """
    (batch, heads, length, _), size = q.shape, v.shape[3]
    y, log_sums = q.new_empty(batch, length, heads, size), q.new_empty(batch, heads, length)
    FORWARD((q, k, v, bias, sink_logits, sink_values, seen, seq_idx, lengths, y, log_sums), scale, *numbers)
    return y.transpose(1, 2), log_sums


_forward = torch.library.custom_op(
    "hf_hybrid_ssm::local_attention_native", _compute_forward, mutates_args=(), device_types="cpu"
)


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    seen: Tensor | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    return q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2), q.new_empty(batch, heads, length)


@torch.library.custom_op("hf_hybrid_ssm::local_attention_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    seen: Tensor | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    y: Tensor,
    log_sums: Tensor,
    dy: Tensor,
    scale: float,
    numbers: List[int],  # noqa: UP006 - all that torch 2.6 reads
) -> List[Tensor]:  # noqa: UP006
    """dq, dk, dv, and those of bias and sink (empty without them)."""
    dq, dk, dv = (_zeros_by_token(x) for x in (q, k, v))
    tables = (bias, sink_logits, sink_values)
    others = [q.new_zeros(0 if x is None else x.shape) for x in tables]
    results = (*(x.transpose(1, 2) for x in (dq, dk, dv)), *(None if x is None else d for x, d in zip(tables, others)))
    BACKWARD((q, k, v, *tables, seen, seq_idx, lengths, y, dy, log_sums, *results), scale, *numbers)
    return [dq, dk, dv, *others]


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    seen: Tensor | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    y: Tensor,
    log_sums: Tensor,
    dy: Tensor,
    scale: float,
    numbers: Sequence[int],
) -> list[Tensor]:
    others = (q.new_empty(0 if x is None else x.shape) for x in (bias, sink_logits, sink_values))
    return [*(_zeros_by_token(x) for x in (q, k, v)), *others]


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.scale, ctx.numbers = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradient(ctx: Any, dy: Tensor, dlog_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, y, log_sums = ctx.saved_tensors  # once: checkpointing unpacks them once
    dense_y, dense_dy = with_dense_rows(y, dy)
    gradients = _backward(*inputs, dense_y, log_sums.contiguous(), dense_dy, ctx.scale, ctx.numbers)
    wanted = (None if x is None else gradient for x, gradient in zip(inputs, gradients))  # what follows has none
    return *wanted, None, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup_context)
register_refusal(_backward, "local_attention_native")


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any) -> int:
    """A multiplication and an addition for each seen pair, in both products."""
    (batch, heads, length, size), (*_, num_keys, value_size) = q, v
    return 2 * batch * heads * _pairs(length, num_keys, rest[-1]) * (size + value_size)


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


count_flops("hf_hybrid_ssm::local_attention_native", _flops)
# scores once more, then four products
count_flops("hf_hybrid_ssm::local_attention_native_backward", lambda *inputs: 2.5 * _flops(*inputs))
