"""The fused CPU backend: `native.c`, compiled on first use and called directly or through custom ops."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.causal_conv.reference import ConvInputs
from hf_hybrid_ssm.ops.causal_conv.torch_backend import causal_conv_torch
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, step_op
from hf_hybrid_ssm.ops.core.native_library import CFunction, library_beside, prepared, supports, with_dense_rows
from hf_hybrid_ssm.ops.core.padding import last_inputs
from hf_hybrid_ssm.ops.core.pages import REFUSES, gathers_pages

__all__ = ["causal_conv_native", "causal_conv_step_native", "supports"]

_library = library_beside(__file__)
_INPUTS = "x[B L D], weight[K D], bias?[D], initial?[B K-1 D], seq_idx?[B L] int64"
FORWARD = CFunction(_library, "causal_conv_forward", f"{_INPUTS}, y[B L D]", "silu, B, L, D, K")
BACKWARD = CFunction(
    _library,
    "causal_conv_backward",
    f"{_INPUTS}, dy[B L D], dx[B L D], dweight[B K D], dbias[B D], dinitial?[B K-1 D]",
    "silu, B, L, D, K",
)
STEP = CFunction(
    _library,
    "causal_conv_step",
    "x[B* 1 D], weight[D K], bias?[D], state[P* K-1 D], pages?[B] int64, y[B 1 D]",
    "x.0, state.0, silu, P, B, K, D",
    refuses=REFUSES,
)


def causal_conv_native(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv`; always returns the final state."""
    x, weight, bias, state, seq_idx, lengths, silu, _ = inputs
    if x.shape[1] == 1:  # a single token costs less in torch than a call through torch.library
        return causal_conv_torch(inputs)
    documents = None if seq_idx is None else seq_idx.long().contiguous()
    dense = (prepared(x), prepared(weight.t()), prepared(bias), prepared(state), documents)
    y = _convolve(*ConvInputs(*dense, silu=silu))
    return y.to(x.dtype), last_inputs(x, weight.shape[1], state, seq_idx, lengths)


def _empty(inputs: ConvInputs) -> Tensor:
    return torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)


def _forward(inputs: ConvInputs) -> Tensor:
    """y (B, L, D); weight is (K, D); all inputs contiguous float32, seq_idx int64."""
    y = _empty(inputs)
    FORWARD((*inputs[:5], y), inputs.silu)
    return y


def _backward(inputs: ConvInputs, gradients: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias and the state."""
    x, weight, state = inputs.x, inputs.weight, inputs.state
    batch, _, channels = x.shape
    dx, dweight, dbias = torch.empty_like(x), x.new_empty(batch, *weight.shape), x.new_empty(batch, channels)
    dstate = None if state is None else torch.empty_like(state)
    BACKWARD((*inputs[:5], gradients[0].contiguous(), dx, dweight, dbias, dstate), inputs.silu)
    return dx, dweight.sum(0), dbias.sum(0), dstate


_convolve = differentiable_op(
    "hf_hybrid_ssm::causal_conv_native", ConvInputs, _forward, _backward, _empty, device_types="cpu"
)


def causal_conv_step_native(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, K - 1, D), or (P, K - 1, D) with pages (B,)."""
    state, pages, dtype = inputs.state, inputs.pages, inputs.x.dtype
    assert state is not None
    if pages is not None and state.dtype != torch.float32:
        return gathers_pages(causal_conv_step_native)(inputs)
    wide = state if state.dtype == torch.float32 else state.float()
    x, weight, bias = inputs.x, prepared(inputs.weight), prepared(inputs.bias)
    if dtype != torch.float32 or x.stride(-1) != 1:  # each decoded token comes here
        (x,) = with_dense_rows(x)
    if x is not inputs.x or weight is not inputs.weight or bias is not inputs.bias or wide is not state:
        inputs = ConvInputs(x, weight, bias, wide, None, None, inputs.silu, pages)
    y = _step(inputs)
    if wide is not state:
        state.copy_(wide)
    return y.to(dtype), state


def _compute_step(inputs: ConvInputs) -> Tensor:
    """y (B, 1, D); weight is (D, K); float32, the rows of x and of the state may lie apart."""
    y = torch.empty(inputs.x.shape, dtype=inputs.x.dtype)
    STEP((*inputs[:4], inputs.pages, y), inputs.silu)
    return y


_step = step_op("hf_hybrid_ssm::causal_conv_step_native", _compute_step, _empty, changes=("state",), inputs=ConvInputs)
