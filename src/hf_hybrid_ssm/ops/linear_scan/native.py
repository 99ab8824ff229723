"""The CPU backend of both scans for diagonal transitions: `native.c`, compiled on first use, as custom ops."""

import ctypes
from functools import cache
from pathlib import Path
from typing import List  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops._core.native_library import call, compile_and_load, prepared, supports
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import channel_scan_torch

__all__ = ["channel_scan_native", "diagonal_scan_native", "supports"]


@cache
def _library() -> ctypes.CDLL:
    return compile_and_load(Path(__file__).with_name("native.c"))


def _integers(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.long().contiguous()


def channel_scan_native(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions, *,
    form, blocks=None
):  # fmt: skip
    """As `channel_scan_torch`, which takes over dense transitions and outputs at some tokens only."""
    if form == "dense" or stride is not None or positions is not None:
        return channel_scan_torch(
            u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions,
            form=form, blocks=blocks,
        )  # fmt: skip
    tensors = (prepared(tensor) for tensor in (vector, output, skip, initial_state))
    rows = (_integers(seq_idx), _integers(lengths))
    y, final = channel_forward(prepared(u), decay.double().contiguous(), *tensors, *rows, form == "complex")
    return y.to(u.dtype), final if return_final_state else None


@torch.library.custom_op("hf_hybrid_ssm::channel_scan_native", mutates_args=(), device_types="cpu")
def channel_forward(
    u: Tensor,
    decay: Tensor,
    vector: Tensor,
    output: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    is_complex: bool,
) -> tuple[Tensor, Tensor]:
    """y (B, L, F, D) and the final state (B, F, D, N); all contiguous, float32 but for the decay in float64."""
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    y, final = u.new_empty(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)
    tensors = (u, decay, vector, output, skip, initial_state, seq_idx, lengths, y, final)
    call(_library().channel_scan_forward, tensors, batch, length, filters, channels, size, is_complex)
    return y, final


@channel_forward.register_fake
def _(u, decay, vector, output, skip, initial_state, seq_idx, lengths, is_complex):
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    return u.new_empty(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)


@torch.library.custom_op("hf_hybrid_ssm::channel_scan_native_backward", mutates_args=(), device_types="cpu")
def channel_backward(
    u: Tensor,
    decay: Tensor,
    vector: Tensor,
    output: Tensor,
    skip: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    lengths: Tensor | None,
    dy: Tensor,
    dfinal: Tensor,
    is_complex: bool,
    trains: bool,
) -> List[Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """Gradients of u, decay, vector, output (zero unless the system `trains`), skip and the initial state."""
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    of_system = [torch.zeros_like(tensor) for tensor in (decay, vector, output)]
    gradients = [torch.empty_like(u), *of_system, u.new_empty(filters, channels), torch.empty_like(dfinal)]
    inputs = (u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal)
    sizes = (batch, length, filters, channels, size)
    call(_library().channel_scan_backward, (*inputs, *gradients), trains, *sizes, is_complex)
    return gradients


@channel_backward.register_fake
def _(u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal, is_complex, trains):
    dskip = u.new_empty(output.shape[:2])
    return [*(torch.empty_like(tensor) for tensor in (u, decay, vector, output)), dskip, torch.empty_like(dfinal)]


def _save_channel(ctx, inputs, output):
    *tensors, ctx.is_complex = inputs
    ctx.save_for_backward(*tensors)


def _channel_gradient(ctx, dy, dfinal):
    needs = ctx.needs_input_grad
    saved = (*ctx.saved_tensors, dy.contiguous(), dfinal.contiguous())
    gradients = channel_backward(*saved, ctx.is_complex, any(needs[1:4]))
    return *(gradient if needed else None for gradient, needed in zip(gradients, needs)), None, None, None


channel_forward.register_autograd(_channel_gradient, setup_context=_save_channel)


def diagonal_scan_native(decay, x, initial_state, seq_idx):
    """As `diagonal_scan_torch`."""
    decay = decay.double().contiguous()
    return diagonal_forward(prepared(x), decay, prepared(initial_state), _integers(seq_idx)).to(x.dtype)


@torch.library.custom_op("hf_hybrid_ssm::diagonal_scan_native", mutates_args=(), device_types="cpu")
def diagonal_forward(x: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    """h, of x's shape (B, L, M) or (B, L, M, 2), float32; decay (M) or (M, 2), float64."""
    h = torch.empty_like(x)
    batch, length = x.shape[:2]
    call(_library().diagonal_scan_forward, (x, decay, initial_state, seq_idx, h), batch, length, *_width(decay))
    return h


def _width(decay: Tensor) -> tuple[int, bool]:
    """Floats that lie side by side, and whether two of them are one number."""
    return decay.numel(), decay.dim() == 2


@diagonal_forward.register_fake
def _(x, decay, initial_state, seq_idx):
    return torch.empty_like(x)


@torch.library.custom_op("hf_hybrid_ssm::diagonal_scan_native_backward", mutates_args=(), device_types="cpu")
def diagonal_backward(
    dh: Tensor, h: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, the decay and the initial state."""
    batch, length = h.shape[:2]
    gradients = torch.empty_like(h), torch.empty_like(decay), h.new_empty(batch, *h.shape[2:])
    inputs = (dh, h, decay, initial_state, seq_idx)
    call(_library().diagonal_scan_backward, (*inputs, *gradients), batch, length, *_width(decay))
    return gradients


@diagonal_backward.register_fake
def _(dh, h, decay, initial_state, seq_idx):
    return torch.empty_like(h), torch.empty_like(decay), h.new_empty(h.shape[0], *h.shape[2:])


def _save_diagonal(ctx, inputs, output):
    _, decay, initial_state, seq_idx = inputs
    ctx.save_for_backward(output, decay, initial_state, seq_idx)


def _diagonal_gradient(ctx, dh):
    gradients = diagonal_backward(dh.contiguous(), *ctx.saved_tensors)
    return *(gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad)), None


diagonal_forward.register_autograd(_diagonal_gradient, setup_context=_save_diagonal)
