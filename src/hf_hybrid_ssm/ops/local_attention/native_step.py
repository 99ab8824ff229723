"""The fused CPU backend of a step: `native_step.c`, called directly or through a custom op."""

from typing import List  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops._core import native_library
from hf_hybrid_ssm.ops._core.native_library import address, call, library_beside, prepared, step_op

_library = library_beside(__file__)


def supports(device_type: str, dtype: torch.dtype) -> str | None:
    """None if the C kernel can run on such tensors, else the reason it cannot."""
    if dtype == torch.float16:
        return "it holds keys and values in float32 or bfloat16, not in float16"
    return native_library.supports(device_type, dtype)


def attention_step_native(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """As `hf_hybrid_ssm.ops.local_attention.attention_step`."""
    left, right = window
    numbers = (-1 if left is None else left, right, chunk_size or 0, int(block), int(shift), int(zero_kv_sink))
    rows = (prepared(q), prepared(k), prepared(v))
    factors = (None if bias is None else bias.float(), prepared(head_scale))
    return _step(*rows, keys, values, seen, *factors, float(scale), numbers).to(q.dtype), keys, values


def _compute(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    keys: Tensor,
    values: Tensor,
    seen: Tensor | None,
    bias: Tensor | None,
    head_scale: Tensor | None,
    scale: float,
    numbers: List[int],  # noqa: UP006 - all that torch 2.6 reads
) -> Tensor:
    """y (B, H, V); the numbers are left (-1: no limit), right, chunk (0: none), block, shift, sink."""
    (batch, heads, size), (_, groups, held, width) = q.shape, values.shape
    y = torch.empty((batch, heads, width), dtype=q.dtype)
    apart = (*keys.stride()[:3], *values.stride()[:3])
    of_bias = (0, 0, 0) if bias is None else (*bias.stride(), bias.shape[1])
    held_at = (address(keys, is_strided=True), address(values, is_strided=True))
    bias_at = None if bias is None else address(bias, is_strided=True)
    tensors = (q, k, v, *held_at, seen, bias_at, head_scale, y)
    sizes = (batch, heads, groups, held, size, width)
    call(_library().attention_step, tensors, scale, *apart, *of_bias, *numbers, keys.dtype != torch.float32, *sizes)
    return y


def _fake(q, k, v, keys, values, *_):
    return q.new_empty(q.shape[0], q.shape[1], values.shape[3])


_step = step_op("hf_hybrid_ssm::attention_step_native", _compute, _fake, changes=("keys", "values"))
