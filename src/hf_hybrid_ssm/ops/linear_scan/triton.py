"""The CUDA backend of both scans for diagonal transitions: launches of the Triton kernels.

Each pass over the tokens is one launch. A program walks through a whole row, so that the time is at least that of a
row's tokens one after the other; rows of `diagonal_scan` that would leave a card idle are cut
(`diagonal_splits`).
"""

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops.core.triton_helpers import device_guard, multiprocessors, supports
from hf_hybrid_ssm.ops.linear_scan import diagonal_splits
from hf_hybrid_ssm.ops.linear_scan import triton_channel_kernels as kernels
from hf_hybrid_ssm.ops.linear_scan.custom_ops import (
    channel_op,
    channel_outputs,
    diagonal_op,
    diagonal_scan_by,
    lti_scan_by,
)
from hf_hybrid_ssm.ops.linear_scan.reference import DiagonalInputs, LtiInputs
from hf_hybrid_ssm.ops.linear_scan.triton_diagonal_kernel import diagonal_kernel

__all__ = ["diagonal_scan_triton", "lti_scan_triton", "supports"]

BLOCK = {"BITS": 5}  # 32 tokens
DIAGONAL_TILE = {"BD": 32, "num_warps": 1, **BLOCK}


def channel_tile(states: int) -> dict[str, int]:
    """One warp, so that sums over the states need no barrier; 256 numbers are eight to a lane, or fewer."""
    size = triton.next_power_of_2(states)
    return {"BN": size, "BD": max(4, 256 // size), "num_warps": 1, **BLOCK}


def _launch(inputs: LtiInputs) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Grid of a launch, its tokens, channels, filters and states, and its constants: (B, L, D) through (F, D, N)."""
    filters, channels, size = inputs.vector.shape
    is_complex = inputs.form == "complex"
    states = size // 2 if is_complex else size
    flags = {"COMPLEX": is_complex, "DOCUMENTS": inputs.seq_idx is not None, "LENGTHS": inputs.lengths is not None}
    constants = flags | channel_tile(states)
    grid = (triton.cdiv(channels, constants["BD"]) * filters * inputs.u.shape[0],)
    return grid, (inputs.u.shape[1], channels, filters, states), constants


def _channel_forward(inputs: LtiInputs) -> tuple[Tensor, Tensor]:
    u, decay, vector, output, skip, state, seq_idx, lengths, *_ = inputs
    y, final = channel_outputs(inputs)
    y = y if lengths is None else y.zero_()  # nothing is written after a row's end
    grid, sizes, options = _launch(inputs)
    if final.shape[:3].numel():
        with device_guard(u):
            kernels.channel_forward_kernel[grid](
                u, decay, vector, output, skip, seq_idx, lengths, state, y, final, *u.stride()[:2], *sizes,
                START=state is not None, SKIP=skip is not None, **options,
            )  # fmt: skip
    return y, final


def _channel_backward(inputs: LtiInputs, dy: Tensor, dfinal: Tensor, trains: bool) -> list[Tensor]:
    u, decay, vector, output, skip, state, seq_idx, lengths, *_ = inputs
    make = dy.new_empty if lengths is None else dy.new_zeros
    du, dstate, dskip = make(dy.shape), torch.empty_like(dfinal), u.new_empty(dfinal.shape[:3])
    dvector, doutput, ddecay = (torch.empty_like(dfinal) for _ in range(3))
    grid, sizes, options = _launch(inputs)
    of_u, of_dy = u.stride()[:2], dy.stride()[:3]
    if dskip.numel():
        with device_guard(u):
            if trains:
                kernels.channel_derivative_kernel[grid](
                    u, dy, decay, vector, output, seq_idx, lengths, state, dfinal, doutput, ddecay,
                    *of_u, *of_dy, *sizes, START=state is not None, **options,
                )  # fmt: skip
            kernels.channel_backward_kernel[grid](
                dy, u, decay, output, vector, skip, seq_idx, lengths, dfinal, du, dstate, dvector, dskip,
                *of_dy, *of_u, *sizes, START=dfinal is not None, SKIP=skip is not None, **options,
            )  # fmt: skip
    ddecay, dvector, doutput = (part.sum(0) for part in (ddecay, dvector, doutput))
    return [du.sum(2), ddecay.view(decay.shape).to(decay.dtype), dvector, doutput, dskip.sum(0), dstate]


_channel = channel_op("hf_hybrid_ssm::lti_scan_triton", _channel_forward, _channel_backward)
lti_scan_triton = lti_scan_by(_channel)


def _run_diagonal(
    inputs: DiagonalInputs,
    out: Tensor,
    h: Tensor | None = None,
    final: Tensor | None = None,
    ddecay: Tensor | None = None,
) -> None:
    """States of the inputs; or, given the states h, with the gradients of these in the place of x, the gradients of x,
    of the state before them (`final`) and of the decay by rows."""
    x, decay, state, seq_idx = inputs
    batch, length, channels = x.shape[:3]
    with device_guard(x):
        diagonal_kernel[(triton.cdiv(channels, DIAGONAL_TILE["BD"]) * batch,)](
            x, h, decay, state, seq_idx, out, final, ddecay, length, channels, BACKWARDS=h is not None,
            COMPLEX=decay.dim() == 2, DOCUMENTS=seq_idx is not None, START=state is not None, **DIAGONAL_TILE,
        )  # fmt: skip


def _splits(x: Tensor) -> int:
    warps = triton.cdiv(x.shape[2], DIAGONAL_TILE["BD"]) * x.shape[0]
    return diagonal_splits.diagonal_splits(warps, x.shape[1], multiprocessors(x.device))


def _diagonal_forward(inputs: DiagonalInputs) -> Tensor:
    if (splits := _splits(inputs.x)) > 1:
        return diagonal_splits.forward(_run_diagonal, inputs, splits)
    h = torch.empty_like(inputs.x)
    _run_diagonal(inputs, h)
    return h


def _diagonal_backward(inputs: DiagonalInputs, dh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = inputs.x
    if (splits := _splits(h)) > 1:
        dx, dstate, parts = diagonal_splits.backward(_run_diagonal, dh, inputs, splits)
    else:
        dx, dstate, parts = torch.empty_like(h), *(h.new_empty(h.shape[0], *h.shape[2:]) for _ in range(2))
        _run_diagonal(inputs._replace(x=dh), dx, h, dstate, parts)
    return dx, parts.sum(0).to(inputs.decay.dtype), dstate


_diagonal = diagonal_op("hf_hybrid_ssm::diagonal_scan_triton", _diagonal_forward, _diagonal_backward)
diagonal_scan_triton = diagonal_scan_by(_diagonal)
