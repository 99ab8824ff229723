"""The CPU backend of both scans for diagonal transitions: `native.c`, compiled on first use."""

import torch

from hf_hybrid_ssm.ops._core.native_library import call, library_beside, supports
from hf_hybrid_ssm.ops.linear_scan.custom_ops import channel_op, channel_scan_by, diagonal_op, diagonal_scan_by

__all__ = ["channel_scan_native", "diagonal_scan_native", "supports"]


_library = library_beside(__file__)


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


_channel = channel_op("hf_hybrid_ssm::channel_scan_native", _channel_forward, _channel_backward, "cpu")
channel_scan_native = channel_scan_by(_channel)


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


_diagonal = diagonal_op("hf_hybrid_ssm::diagonal_scan_native", _diagonal_forward, _diagonal_backward, "cpu")
diagonal_scan_native = diagonal_scan_by(_diagonal)
