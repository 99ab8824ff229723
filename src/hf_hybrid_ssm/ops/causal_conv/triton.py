"""The short causal convolution on CUDA: launches of the Triton kernels, as torch.library ops with autograd."""

from typing import List  # noqa: UP035

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops._core.last_inputs import last_inputs
from hf_hybrid_ssm.ops._core.triton_helpers import contiguous, dense_rows, device_guard, strides, supports
from hf_hybrid_ssm.ops.causal_conv import triton_kernels as kernels

__all__ = ["causal_conv_triton", "supports"]

TILE = {"BT": 32, "BD": 64, "num_warps": 4, "enable_fp_fusion": True}


def causal_conv_triton(x, weight, bias=None, *, activation=None, initial_state=None, seq_idx=None, lengths=None):
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv`; always returns the final state."""
    y = convolve(x, weight, bias, initial_state, seq_idx, activation == "silu")
    return y, last_inputs(x, weight.shape[1], initial_state, seq_idx, lengths)


@torch.library.custom_op("hf_hybrid_ssm::causal_conv_triton", mutates_args=())
def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, seq_idx: Tensor | None, silu: bool
) -> Tensor:
    """y (B, L, D) of x (B, L, D), weight (D, K), state (B, K - 1, D)."""
    (x,) = dense_rows(x)
    weight, bias, initial_state, seq_idx = contiguous(weight, bias, initial_state, seq_idx)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        with device_guard(x):
            kernels.forward_kernel[_grid(x, x.shape[1])](
                x, weight, bias, initial_state, seq_idx, y, *strides(x), *x.shape[1:],
                **_flags(weight, initial_state, seq_idx), HAS_BIAS=bias is not None, SILU=silu, **TILE,
            )  # fmt: skip
    return y


@convolve.register_fake
def _(x, weight, bias, initial_state, seq_idx, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("hf_hybrid_ssm::causal_conv_triton_backward", mutates_args=())
def convolve_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    silu: bool,
) -> List[Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """Gradients of x, weight, bias and the state; empty ones for absent arguments."""
    x, grad_y = dense_rows(x, grad_y)
    weight, bias, initial_state, seq_idx = contiguous(weight, bias, initial_state, seq_idx)
    batch, length, channels = x.shape
    width = weight.shape[1]
    grid = _grid(x, length)
    parts = batch * grid[1]
    exact = {"dtype": torch.float32, "device": x.device}
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dstate = torch.zeros_like(initial_state) if initial_state is not None else torch.empty(0, **exact)
    grad_sum = torch.empty(x.shape, **exact)
    dweight = torch.empty(parts, channels, width, **exact)
    dbias = torch.empty((parts, channels) if bias is not None else (0,), **exact)
    flags = _flags(weight, initial_state, seq_idx)
    if dx.numel():
        with device_guard(x):
            kernels.weight_gradient_kernel[grid](
                x, weight, bias, initial_state, seq_idx, grad_y, grad_sum, dweight, dbias,
                *strides(x, grad_y), length, channels,
                **flags, HAS_BIAS=bias is not None, SILU=silu, **TILE,
            )  # fmt: skip
            kernels.input_gradient_kernel[_grid(x, length + width - 1)](
                grad_sum, weight, seq_idx, dx, dstate, length, channels, **flags, **TILE
            )
    dweight = dweight.sum(0).to(weight.dtype)
    return [dx, dweight, dbias if bias is None else dbias.sum(0).to(bias.dtype), dstate]


@convolve_backward.register_fake
def _(grad_y, x, weight, bias, initial_state, seq_idx, silu):
    absent = torch.empty(0, dtype=torch.float32, device=x.device)
    dx, dweight = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, weight))
    return [dx, dweight, *(absent if t is None else torch.empty_like(t) for t in (bias, initial_state))]


def _save_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_y):
    x, weight, bias, initial_state, seq_idx = ctx.saved_tensors  # once: checkpointing unpacks them once
    dx, dweight, dbias, dstate = convolve_backward(grad_y, x, weight, bias, initial_state, seq_idx, ctx.silu)
    return dx, dweight, None if bias is None else dbias, None if initial_state is None else dstate, None, None


convolve.register_autograd(_backward, setup_context=_save_for_backward)


def _grid(x: Tensor, length: int) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[2], TILE["BD"]), triton.cdiv(length, TILE["BT"]), x.shape[0]


def _flags(weight: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> dict[str, int]:
    return {
        "K": weight.shape[1],
        "HAS_STATE": initial_state is not None and weight.shape[1] > 1,
        "HAS_DOCUMENTS": seq_idx is not None,
    }
