"""The CUDA backend of both scans for diagonal transitions: launches of the Triton kernels.

Each pass over the tokens is one launch. A program walks through a whole row, so that the time is at least that of a
row's tokens one after the other.
"""

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops._core.triton_helpers import device_guard, supports
from hf_hybrid_ssm.ops.linear_scan import triton_kernels as kernels
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import channel_scan_torch
from hf_hybrid_ssm.ops.linear_scan.custom_ops import channel_op, diagonal_op, run_channel_op, run_diagonal_op

__all__ = ["channel_scan_triton", "diagonal_scan_triton", "supports"]

FORWARD, DERIVATIVE, BACKWARD = range(3)
BLOCK = {"BITS": 5}  # 32 tokens
DIAGONAL_TILE = {"BD": 32, "num_warps": 1, **BLOCK}


def channel_tile(states: int) -> dict[str, int]:
    """One warp, so that sums over the states need no barrier; 256 numbers are eight to a lane, or fewer."""
    size = triton.next_power_of_2(states)
    return {"BN": size, "BD": max(4, 256 // size), "num_warps": 1, **BLOCK}


def channel_scan_triton(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions, *,
    form, blocks=None
):  # fmt: skip
    """As `channel_scan_torch`, which takes over dense transitions and outputs at some tokens only."""
    tensors = (u, decay, vector, output, skip, initial_state, seq_idx, lengths)
    if form == "dense" or stride is not None or positions is not None:
        return channel_scan_torch(*tensors, return_final_state, stride, positions, form=form, blocks=blocks)
    y, final = run_channel_op(_channel, *tensors, is_complex=form == "complex")
    return y, final if return_final_state else None


def _launch(run_pass: int, signal, weight, system, skip, seq_idx, lengths, start, final_grad, outputs, is_complex):
    """One pass: `signal` and `weight` are (B, L, D) or (B, L, F, D), `system` is the decay and what enters and leaves.

    `outputs`: out (B, L, F, D), final and the two sums over time (B, F, D, N), dskip (B, F, D); None where the pass
    has none.
    """
    decay, entering, reading = system
    filters, channels, size = entering.shape
    states = size // 2 if is_complex else size
    batch, length = signal.shape[:2]
    tile = channel_tile(states)
    grid = (triton.cdiv(channels, tile["BD"]) * filters * batch,)
    if not batch * channels * filters:
        return
    with device_guard(signal):
        kernels.channel_kernel[grid](
            signal, weight, decay, entering, reading, skip, seq_idx, lengths, start, final_grad, *outputs,
            *_strides(signal), *_strides(weight), length, channels, filters, states,
            PASS=run_pass, COMPLEX=is_complex, DOCUMENTS=seq_idx is not None, LENGTHS=lengths is not None,
            START=start is not None, SKIP=skip is not None, **tile,
        )  # fmt: skip


def _strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """Of row, token and filter."""
    if tensor is None:
        return 0, 0, 0
    return tensor.stride(0), tensor.stride(1), tensor.stride(2) if tensor.dim() == 4 else 0


def _channel_forward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, is_complex):
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    make = u.new_empty if lengths is None else u.new_zeros  # nothing is written after a row's end
    y, final = make(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)
    rows, system = (skip, seq_idx, lengths, initial_state, None), (decay, vector, output)
    _launch(FORWARD, u, None, system, *rows, (y, final, None, None, None), is_complex)
    return y, final


def _channel_backward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal, is_complex, trains):
    (batch, _, channels), filters = u.shape, output.shape[0]
    make = dy.new_empty if lengths is None else dy.new_zeros
    du, dinitial, dskip = make(dy.shape), torch.empty_like(dfinal), u.new_empty(batch, filters, channels)
    dvector, doutput, ddecay = (torch.empty_like(dfinal) for _ in range(3))
    rows = (seq_idx, lengths)
    if trains:
        outputs = (None, None, doutput, ddecay, None)
        _launch(DERIVATIVE, u, dy, (decay, vector, output), None, *rows, initial_state, dfinal, outputs, is_complex)
    outputs = (du, dinitial, dvector, None, dskip)
    _launch(BACKWARD, dy, u, (decay, output, vector), skip, *rows, dfinal, None, outputs, is_complex)
    of_system = (part.sum(0) for part in (ddecay, dvector, doutput))
    ddecay, dvector, doutput = of_system
    return [du.sum(2), ddecay.view(decay.shape).to(decay.dtype), dvector, doutput, dskip.sum(0), dinitial]


_channel = channel_op("triton", _channel_forward, _channel_backward)


def diagonal_scan_triton(decay, x, initial_state, seq_idx):
    """As `diagonal_scan_torch`."""
    return run_diagonal_op(_diagonal, decay, x, initial_state, seq_idx)


def _run_diagonal(x, h, decay, initial_state, seq_idx, out, final, ddecay):
    batch, length, channels = x.shape[:3]
    with device_guard(x):
        kernels.diagonal_kernel[(triton.cdiv(channels, DIAGONAL_TILE["BD"]) * batch,)](
            x, h, decay, initial_state, seq_idx, out, final, ddecay, length, channels, BACKWARDS=h is not None,
            COMPLEX=decay.dim() == 2, DOCUMENTS=seq_idx is not None, START=initial_state is not None, **DIAGONAL_TILE,
        )  # fmt: skip


def _diagonal_forward(x, decay, initial_state, seq_idx):
    h = torch.empty_like(x)
    _run_diagonal(x, None, decay, initial_state, seq_idx, h, None, None)
    return h


def _diagonal_backward(dh, h, decay, initial_state, seq_idx):
    dx, dinitial, parts = torch.empty_like(h), *(h.new_empty(h.shape[0], *h.shape[2:]) for _ in range(2))
    _run_diagonal(dh, h, decay, initial_state, seq_idx, dx, dinitial, parts)
    return dx, parts.sum(0).to(decay.dtype), dinitial


_diagonal = diagonal_op("triton", _diagonal_forward, _diagonal_backward)
