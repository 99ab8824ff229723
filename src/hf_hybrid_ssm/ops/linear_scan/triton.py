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
from hf_hybrid_ssm.ops.linear_scan.custom_ops import channel_op, diagonal_op, diagonal_scan_by, lti_scan_by
from hf_hybrid_ssm.ops.linear_scan.triton_diagonal_kernel import diagonal_kernel

__all__ = ["diagonal_scan_triton", "lti_scan_triton", "supports"]

BLOCK = {"BITS": 5}  # 32 tokens
DIAGONAL_TILE = {"BD": 32, "num_warps": 1, **BLOCK}


def channel_tile(states: int) -> dict[str, int]:
    """One warp, so that sums over the states need no barrier; 256 numbers are eight to a lane, or fewer."""
    size = triton.next_power_of_2(states)
    return {"BN": size, "BD": max(4, 256 // size), "num_warps": 1, **BLOCK}


def _grid(u: Tensor, entering: Tensor, tile: dict[str, int]) -> tuple[int]:
    filters, channels, _ = entering.shape
    return (triton.cdiv(channels, tile["BD"]) * filters * u.shape[0],)


def _options(
    u: Tensor, entering: Tensor, seq_idx: Tensor | None, lengths: Tensor | None, is_complex: bool
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Tokens, channels, filters and states of a launch, and its constants: (B, L, D) through (F, D, N)."""
    filters, channels, size = entering.shape
    states = size // 2 if is_complex else size
    flags = {"COMPLEX": is_complex, "DOCUMENTS": seq_idx is not None, "LENGTHS": lengths is not None}
    return (u.shape[1], channels, filters, states), flags | channel_tile(states)


def _channel_forward(
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
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    make = u.new_empty if lengths is None else u.new_zeros  # nothing is written after a row's end
    y, final = make(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)
    sizes, options = _options(u, vector, seq_idx, lengths, is_complex)
    if batch * channels * filters:
        with device_guard(u):
            kernels.channel_forward_kernel[_grid(u, vector, options)](
                u, decay, vector, output, skip, seq_idx, lengths, initial_state, y, final, *u.stride()[:2], *sizes,
                START=initial_state is not None, SKIP=skip is not None, **options,
            )  # fmt: skip
    return y, final


def _channel_backward(
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
) -> list[Tensor]:
    (batch, _, channels), filters = u.shape, output.shape[0]
    make = dy.new_empty if lengths is None else dy.new_zeros
    du, dinitial, dskip = make(dy.shape), torch.empty_like(dfinal), u.new_empty(batch, filters, channels)
    dvector, doutput, ddecay = (torch.empty_like(dfinal) for _ in range(3))
    sizes, options = _options(u, vector, seq_idx, lengths, is_complex)
    grid = _grid(u, vector, options)
    of_u, of_dy = u.stride()[:2], dy.stride()[:3]
    if batch * channels * filters:
        with device_guard(u):
            if trains:
                kernels.channel_derivative_kernel[grid](
                    u, dy, decay, vector, output, seq_idx, lengths, initial_state, dfinal, doutput, ddecay,
                    *of_u, *of_dy, *sizes, START=initial_state is not None, **options,
                )  # fmt: skip
            kernels.channel_backward_kernel[grid](
                dy, u, decay, output, vector, skip, seq_idx, lengths, dfinal, du, dinitial, dvector, dskip,
                *of_dy, *of_u, *sizes, START=dfinal is not None, SKIP=skip is not None, **options,
            )  # fmt: skip
    ddecay, dvector, doutput = (part.sum(0) for part in (ddecay, dvector, doutput))
    return [du.sum(2), ddecay.view(decay.shape).to(decay.dtype), dvector, doutput, dskip.sum(0), dinitial]


_channel = channel_op("hf_hybrid_ssm::lti_scan_triton", _channel_forward, _channel_backward)
lti_scan_triton = lti_scan_by(_channel)


def _run_diagonal(
    x: Tensor,
    h: Tensor | None,
    decay: Tensor,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    out: Tensor,
    final: Tensor | None,
    ddecay: Tensor | None,
) -> None:
    batch, length, channels = x.shape[:3]
    with device_guard(x):
        diagonal_kernel[(triton.cdiv(channels, DIAGONAL_TILE["BD"]) * batch,)](
            x, h, decay, initial_state, seq_idx, out, final, ddecay, length, channels, BACKWARDS=h is not None,
            COMPLEX=decay.dim() == 2, DOCUMENTS=seq_idx is not None, START=initial_state is not None, **DIAGONAL_TILE,
        )  # fmt: skip


def _splits(x: Tensor) -> int:
    warps = triton.cdiv(x.shape[2], DIAGONAL_TILE["BD"]) * x.shape[0]
    return diagonal_splits.diagonal_splits(warps, x.shape[1], multiprocessors(x.device))


def _diagonal_forward(x: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    if (splits := _splits(x)) > 1:
        return diagonal_splits.forward(_run_diagonal, x, decay, initial_state, seq_idx, splits)
    h = torch.empty_like(x)
    _run_diagonal(x, None, decay, initial_state, seq_idx, h, None, None)
    return h


def _diagonal_backward(
    dh: Tensor, h: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if (splits := _splits(h)) > 1:
        given = (dh, h, decay, initial_state, seq_idx)
        dx, dinitial, parts = diagonal_splits.backward(_run_diagonal, *given, splits)
    else:
        dx, dinitial, parts = torch.empty_like(h), *(h.new_empty(h.shape[0], *h.shape[2:]) for _ in range(2))
        _run_diagonal(dh, h, decay, initial_state, seq_idx, dx, dinitial, parts)
    return dx, parts.sum(0).to(decay.dtype), dinitial


_diagonal = diagonal_op("hf_hybrid_ssm::diagonal_scan_triton", _diagonal_forward, _diagonal_backward)
diagonal_scan_triton = diagonal_scan_by(_diagonal)
