"""The fused CPU backend: `native.c`, compiled on first use and called directly or through custom ops."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.causal_conv.torch_backend import causal_conv_torch
from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops.core.native_library import library_beside, prepared, step_op, supports, with_dense_rows
from hf_hybrid_ssm.ops.core.padding import last_inputs
from hf_hybrid_ssm.ops.core.pages import REFUSES, on_rows

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


def causal_conv_native(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv`; always returns the final state."""
    if x.shape[1] == 1:  # a single token costs less in torch than a call through torch.library
        options: dict[str, Any] = {"activation": activation, "initial_state": initial_state}
        options |= {"seq_idx": seq_idx, "lengths": lengths}
        return causal_conv_torch(x, weight, bias, **options)
    inputs = (prepared(x), prepared(weight.t()), prepared(bias), prepared(initial_state))
    documents = None if seq_idx is None else seq_idx.long().contiguous()
    y = _convolve(*inputs, documents, activation == "silu")
    return y.to(x.dtype), last_inputs(x, weight.shape[1], initial_state, seq_idx, lengths)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, seq_idx: Tensor | None, silu: bool
) -> Tensor:
    """y (B, L, D); weight is (K, D); all inputs contiguous float32, seq_idx int64."""
    y = torch.empty_like(x)
    FORWARD((x, weight, bias, initial_state, seq_idx, y), silu)
    return y


def _backward(inputs: Sequence, gradients: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias and the state."""
    *tensors, silu = inputs
    (x, weight, _, initial_state, _), dy = tensors, gradients[0].contiguous()
    batch, _, channels = x.shape
    dx, dweight, dbias = torch.empty_like(x), x.new_empty(batch, *weight.shape), x.new_empty(batch, channels)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    BACKWARD((*tensors, dy, dx, dweight, dbias, dinitial), silu)
    return dx, dweight.sum(0), dbias.sum(0), dinitial


_convolve = differentiable_op(
    "hf_hybrid_ssm::causal_conv_native",
    _forward,
    _backward,
    fake=lambda x, *_: torch.empty_like(x),
    device_types="cpu",
)


def causal_conv_step_native(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, K - 1, D), or (P, K - 1, D) with pages (B,)."""
    if pages is not None and state.dtype != torch.float32:
        step = partial(causal_conv_step_native, x, weight=weight, bias=bias, activation=activation)
        return on_rows(lambda rows: step(state=rows)[0], state, pages), state
    wide = state if state.dtype == torch.float32 else state.float()
    y = _step(*with_dense_rows(x), wide, prepared(weight), prepared(bias), pages, activation == "silu")
    if wide is not state:
        state.copy_(wide)
    return y.to(x.dtype), state


def _compute_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, pages: Tensor | None, silu: bool
) -> Tensor:
    """y (B, 1, D); weight is (D, K); float32, the rows of x and of the state may lie apart."""
    y = torch.empty(x.shape, dtype=x.dtype)
    STEP((x, weight, bias, state, pages, y), silu)
    return y


_step = step_op(
    "hf_hybrid_ssm::causal_conv_step_native", _compute_step, lambda x, *_: x.new_empty(x.shape), changes=("state",)
)
