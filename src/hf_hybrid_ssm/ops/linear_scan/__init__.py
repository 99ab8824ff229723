r"""Linear recurrences: a small system for every channel (here), and a diagonal one whose states are the result
(`diagonal`).

A system is read out without ever storing its states: S4, S4D, EMA.

    s_t = A s_{t-1} + B u_t,    y_t = C s_t + D u_t        for each filter f and channel c on its own

The states of every token would be L times N numbers per channel. The kernels for diagonal transitions keep the states
of one token in registers. Elsewhere (`channel_blocks`) a row is cut into blocks of w tokens: the filter
K_j = C A^j B acts inside a block as a Toeplitz matrix, A^{w-1-p} B takes its tokens into the state at its end,
C A^{p+1} reads the state at its start. Only the state at block borders exists, and it is what makes pieces,
documents, ragged rows and one-token steps one and the same computation.
"""

from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.output_positions import OutputPositions
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import (
    BlockMatrices,
    BlockOutputs,
    BlockStates,
    block_outputs,
    block_states,
    long_kernel,
    lti_scan_torch,
)
from hf_hybrid_ssm.ops.linear_scan.diagonal import diagonal_scan
from hf_hybrid_ssm.ops.linear_scan.reference import LTI_EXAMPLES, LtiInputs, StepInputs, lti_scan_reference
from hf_hybrid_ssm.ops.linear_scan.token import lti_token
from hf_hybrid_ssm.ops.linear_scan.transition import Transition

_OP = Op(
    "lti_scan",
    builtin={"torch": lti_scan_torch, "reference": lti_scan_reference},
    kernels={
        "native": "hf_hybrid_ssm.ops.linear_scan.native",
        "triton": "hf_hybrid_ssm.ops.linear_scan.triton",
    },
    examples=LTI_EXAMPLES,
)


class ChannelSystem(NamedTuple):
    """F filters for each of D channels: A, B, C.

    Args:
        transition: A. A diagonal one may be in float64 whatever the rest is: its powers are then rounded once.
        vector: B (F, D, N).
        output: C (F, D, N); the scan computes in its dtype (float32 or float64).
        blocks: gives their `block_states` and `block_outputs`, from a cache perhaps; asked only where needed.
    """

    transition: Transition
    vector: torch.Tensor
    output: torch.Tensor
    blocks: BlockMatrices | None = None


def lti_scan(
    u: torch.Tensor,
    system: ChannelSystem,
    *,
    skip: torch.Tensor | None = None,
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | None = None,
    stride: int | None = None,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Run the systems over a batch of sequences.

    Args:
        u: (B, L, D), any floating dtype; computed in the dtype of `system.output` (float32 or float64).
        system: F filters on each of the D channels, N real state dimensions each.
        skip: (F, D), the D term; None leaves it out.
        rows: how the rows are read; the state is zero where a document begins.
        initial_state: (B, F, D, N) the state before the first token (zeros when None).
        stride: give y only at the tokens stride - 1, 2 stride - 1, ... (cheap when it is a multiple of the block).
        positions: (B, J) int64, give y only at these tokens of each row (0..L-1).

    Returns:
        y (B, L, F, D), or (B, L // stride, F, D), or (B, J, F, D), in u's dtype; the final state (B, F, D, N) or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    check_tensor("system.output", system.output, (None, None, None), "F, D, N")
    filters, channels, size = system.output.shape
    _check_system(system)
    check_tensor("u", u, (None, None, channels), "B, L, D")
    batch, length, _ = u.shape
    shape = (batch, filters, channels, size)
    check_tensor("initial_state", initial_state, shape, "B, F, D, N", beside=u, optional=True)
    check_tensor("skip", skip, (filters, channels), "F, D", beside=u, optional=True)
    check_tensor("system.output", system.output, (filters, channels, size), "F, D, N", beside=u)
    seq_idx, lengths = checked_rows(rows, batch, length)
    wanted = OutputPositions.of(stride, positions, batch, length)
    dtype, (decay, form) = system.output.dtype, system.transition
    skip, state = (None if part is None else part.to(dtype) for part in (skip, initial_state))
    options = (seq_idx, lengths, form, rows.return_final_state, wanted, system.blocks)
    inputs = LtiInputs(u, decay, system.vector, system.output, skip, state, *options)
    run = _OP.select(u.device.type, dtype, backend)
    with without_autocast(u.device.type):
        return run(inputs)


def _check_system(system: ChannelSystem) -> None:
    """B like C, and an A that can be repeated to (F, D, N): fewer decays are shared."""
    output, (decay, form) = system.output, system.transition
    check_tensor("system.vector", system.vector, tuple(output.shape), "F, D, N", beside=output)
    if form not in ("real", "complex", "dense"):
        raise ValueError(f"system.transition.form={form!r} must be 'real', 'complex' or 'dense'.")
    if form == "complex" and output.shape[2] % 2:
        raise ValueError(f"a complex transition needs an even N, got {output.shape[2]}.")
    *leading, size = output.shape
    entries = {"real": (size,), "complex": (size // 2, 2), "dense": (size, size)}[form]
    rank = len(entries)
    shape = tuple(decay.shape)
    fits = shape[len(shape) - rank :] == entries and len(shape) <= rank + 2
    batch = shape[: len(shape) - rank]
    if not fits or any(have not in (1, wanted) for have, wanted in zip(reversed(batch), reversed(leading))):
        raise ValueError(
            f"system.transition.value must have shape {(*leading, *entries)}, or fewer leading dimensions or 1 where "
            f"filters or channels share it, got {shape}."
        )
    if decay.device != output.device:
        raise ValueError(f"system.transition.value must be on {output.device} like output, got {decay.device}.")


def has_fused_scan(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a kernel runs the recurrence of a diagonal system itself, without block matrices or a filter."""
    return _OP.select(device_type, dtype) is not lti_scan_torch


__all__ = [
    "BlockMatrices",
    "BlockOutputs",
    "BlockStates",
    "ChannelSystem",
    "StepInputs",
    "Transition",
    "block_outputs",
    "block_states",
    "diagonal_scan",
    "has_fused_scan",
    "long_kernel",
    "lti_scan",
    "lti_token",
]
