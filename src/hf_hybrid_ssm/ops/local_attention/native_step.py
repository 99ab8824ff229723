"""The fused CPU backend of a step: `native_step.c`, called directly or through a custom op."""

from typing import Any, List  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core import native_library
from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.native_library import contiguous, library_beside, prepared, step_op
from hf_hybrid_ssm.ops.local_attention.distance_range import Limits

STEP = CFunction(
    library_beside(__file__),
    "attention_step",
    """q[B H 1 E], k?[B G 1 E], v?[B G 1 V], keys[B* G* M* E] held, values[B* G* M* V] held, seen?[B] int64,
    bias?[H* R*], head_scale?[H], sink_logits?[B* H* 1], sink_values?[S V], y[B H 1 V]""",
    """scale:float, keys.0, keys.1, keys.2, values.0, values.1, values.2, bias.0, bias.1, R, sink_logits.0,
    sink_logits.1, left, right, chunk, block, shift, zero_sink, narrow, B, H, G, M, E, V, S""",
    refuses="seen must not be negative: it is how many tokens the row's document has had.",
)


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if the C kernel can run on such tensors, else the reason it cannot."""
    if dtype == torch.float16:
        return "it holds keys and values in float32 or bfloat16, not in float16"
    return native_library.supports(device_type, dtype)


def attention_step_native(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    *,
    window: Limits,
    chunk_size: int | None,
    block: bool,
    bias: Tensor | None,
    scale: float,
    head_scale: Tensor | None,
    zero_kv_sink: bool,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    shift: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.local_attention.slot_attention`."""
    left, right = window
    numbers = (-1 if left is None else left, right, chunk_size or 0, int(block), int(shift), int(zero_kv_sink))
    dense = (prepared(q), prepared(k), prepared(v))
    factors = (None if bias is None else bias.float(), prepared(head_scale))
    sink = (None if sink_logits is None else sink_logits.float(), prepared(sink_values))
    seen = contiguous(seen, torch.int64)
    return _step(*dense, keys, values, seen, *factors, *sink, float(scale), numbers).to(q.dtype), keys, values


def _compute(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    head_scale: Tensor | None,
    sink_logits: Tensor | None,
    sink_values: Tensor | None,
    scale: float,
    numbers: List[int],  # noqa: UP006 - all that torch 2.6 reads
) -> Tensor:
    """y (B, H, 1, V); the numbers are left (-1: no limit), right, chunk (0: none), block, shift, zero_sink."""
    y = torch.empty((*q.shape[:3], values.shape[3]), dtype=q.dtype)
    tensors = (q, k, v, keys, values, seen, bias, head_scale, sink_logits, sink_values, y)
    STEP(tensors, scale, *numbers, keys.dtype != torch.float32)
    return y


def _fake(q: Tensor, k: Tensor | None, v: Tensor | None, keys: Tensor, values: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], 1, values.shape[3])


_step = step_op("hf_hybrid_ssm::attention_step_native", _compute, _fake, changes=("keys", "values"))
