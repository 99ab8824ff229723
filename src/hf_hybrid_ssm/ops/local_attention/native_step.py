"""The fused CPU backend of a step: `native_step.c`, called directly or through a custom op."""

from typing import List, NamedTuple  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core import native_library
from hf_hybrid_ssm.ops.core.custom_ops import step_op
from hf_hybrid_ssm.ops.core.native_library import CFunction, contiguous, library_beside, prepared
from hf_hybrid_ssm.ops.local_attention.inputs import LAYOUTS, StepInputs

STEP = CFunction(
    library_beside(__file__),
    "attention_step",
    """q[B H 1 E], k?[B G 1 E], v?[B G 1 V], keys[B* G* M* E] held, values[B* G* M* V] held, seen?[B] int64,
    bias?[H* R*], head_scale?[H], sink_logits?[B* H* 1], sink_values?[S V], mask?[B* M] bool, y[B H 1 V]""",
    """scale:float, keys.0, keys.1, keys.2, values.0, values.1, values.2, bias.0, bias.1, R, sink_logits.0,
    sink_logits.1, mask.0, left, right, chunk, layout, zero_sink, narrow, B, H, G, M, E, V, S""",
    refuses="seen must not be negative, nor, by rank without a left, the number of slots: it is how many tokens the "
    "document has had.",
)


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if the C kernel can run on such tensors, else the reason it cannot."""
    if dtype == torch.float16:
        return "it holds keys and values in float32 or bfloat16, not in float16"
    return native_library.supports(device_type, dtype)


def attention_step_native(inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.local_attention.slot_attention`."""
    q, k, v, keys, values, seen, bias, head_scale, logits, of_sink, (left, right), chunk, layout, *_ = inputs
    scale, zero_kv_sink, mask = inputs.scale, inputs.zero_kv_sink, inputs.mask
    numbers = [-1 if left is None else left, right, chunk or 0, LAYOUTS.index(layout), int(zero_kv_sink)]
    factors = (None if bias is None else bias.float(), prepared(head_scale))
    sink = (None if logits is None else logits.float(), prepared(of_sink))
    seen = contiguous(seen, torch.int64)
    dense = (prepared(q), prepared(k), prepared(v), keys, values, seen, *factors, *sink, mask)
    return _step(_Inputs(*dense, float(scale), numbers)).to(q.dtype), keys, values


class _Inputs(NamedTuple):
    """What C takes; the numbers are left (-1: no limit), right, chunk (0: none), layout, zero_sink."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    keys: Tensor
    values: Tensor
    seen: Tensor | None
    bias: Tensor | None
    head_scale: Tensor | None
    sink_logits: Tensor | None
    sink_values: Tensor | None
    mask: Tensor | None
    scale: float
    numbers: List[int]  # noqa: UP006 - all that torch 2.6 reads


def _compute(inputs: _Inputs) -> Tensor:
    """y (B, H, 1, V)."""
    y = _empty(inputs)
    STEP((*inputs[:11], y), inputs.scale, *inputs.numbers, inputs.keys.dtype != torch.float32)
    return y


def _empty(inputs: _Inputs) -> Tensor:
    return inputs.q.new_empty((*inputs.q.shape[:3], inputs.values.shape[3]))


_step = step_op("hf_hybrid_ssm::attention_step_native", _compute, _empty, changes=("keys", "values"), inputs=_Inputs)
