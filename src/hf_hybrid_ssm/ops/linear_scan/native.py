"""The CPU backend of both scans for diagonal transitions: `native.c`, compiled on first use."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from hf_hybrid_ssm.ops._core.native_library import call, compile_and_load, supports
from hf_hybrid_ssm.ops._core.output_positions import take_outputs
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import channel_scan_torch
from hf_hybrid_ssm.ops.linear_scan.custom_ops import channel_op, diagonal_op, run_channel_op, run_diagonal_op

__all__ = ["channel_scan_native", "diagonal_scan_native", "supports"]


@cache
def _library() -> ctypes.CDLL:
    return compile_and_load(Path(__file__).with_name("native.c"))


def channel_scan_native(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions, *,
    form, blocks=None
):  # fmt: skip
    """As `channel_scan_torch`, which takes over dense transitions.

    Outputs at some tokens only are taken of all of them. The block matrices of many filters that train would cost
    more; those of constant filters are known already, and their products are faster.
    """
    tensors = (u, decay, vector, output, skip, initial_state, seq_idx, lengths)
    asks_for_all = stride is None and positions is None
    trains = torch.is_grad_enabled() and any(part.requires_grad for part in (decay, vector, output))
    if form == "dense" or not (asks_for_all or trains):
        return channel_scan_torch(*tensors, return_final_state, stride, positions, form=form, blocks=blocks)
    y, final = run_channel_op(_channel, *tensors, is_complex=form == "complex")
    if not asks_for_all:
        y = take_outputs(y.flatten(2), stride, positions).unflatten(2, y.shape[2:])
    return y, final if return_final_state else None


def _channel_forward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, is_complex):
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    y, final = u.new_empty(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)
    tensors = (u, decay, vector, output, skip, initial_state, seq_idx, lengths, y, final)
    call(_library().channel_scan_forward, tensors, batch, length, filters, channels, size, is_complex)
    return y, final


def _channel_backward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal, is_complex, trains):
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    of_system = [torch.zeros_like(tensor) for tensor in (decay, vector, output)]
    gradients = [torch.empty_like(u), *of_system, u.new_empty(filters, channels), torch.empty_like(dfinal)]
    inputs = (u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal)
    sizes = (batch, length, filters, channels, size)
    call(_library().channel_scan_backward, (*inputs, *gradients), trains, *sizes, is_complex)
    return gradients


_channel = channel_op("native", _channel_forward, _channel_backward, "cpu")


def diagonal_scan_native(decay, x, initial_state, seq_idx):
    """As `diagonal_scan_torch`."""
    return run_diagonal_op(_diagonal, decay, x, initial_state, seq_idx)


def _diagonal_forward(x, decay, initial_state, seq_idx):
    h = torch.empty_like(x)
    batch, length = x.shape[:2]
    call(_library().diagonal_scan_forward, (x, decay, initial_state, seq_idx, h), batch, length, *_width(decay))
    return h


def _diagonal_backward(dh, h, decay, initial_state, seq_idx):
    batch, length = h.shape[:2]
    gradients = torch.empty_like(h), torch.empty_like(decay), h.new_empty(batch, *h.shape[2:])
    inputs = (dh, h, decay, initial_state, seq_idx)
    call(_library().diagonal_scan_backward, (*inputs, *gradients), batch, length, *_width(decay))
    return gradients


def _width(decay: torch.Tensor) -> tuple[int, bool]:
    """Floats that lie side by side, and whether two of them are one number."""
    return decay.numel(), decay.dim() == 2


_diagonal = diagonal_op("native", _diagonal_forward, _diagonal_backward, "cpu")
