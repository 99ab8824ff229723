"""The fused CPU backend of a step: `native_step.c`, called directly or through a custom op."""

import torch
from torch import Tensor

from hf_hybrid_ssm.ops._core.native_library import call, library_beside, prepared, step_op, supports

__all__ = ["linear_step_native", "supports"]

_library = library_beside(__file__)


def linear_step_native(u, state, change, input_vector, *, output_rows, low_rank, skip, is_complex, silu):
    """As `hf_hybrid_ssm.ops.linear_scan.linear_step`."""
    wide = prepared(state)
    constants = (prepared(part) for part in (change, input_vector, *(low_rank or (None, None)), output_rows, skip))
    y = _step(prepared(u), wide, *constants, is_complex, silu)
    if wide is not state:
        state.copy_(wide)
    return None if output_rows is None else y.to(u.dtype), state


def _compute(
    u: Tensor,
    state: Tensor,
    change: Tensor,
    input_vector: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    output_rows: Tensor | None,
    skip: Tensor | None,
    is_complex: bool,
    silu: bool,
) -> Tensor:
    """y (B, F, D), empty without output rows; all contiguous float32."""
    batch, filters, channels, states = state.shape
    y = torch.empty((batch, filters if output_rows is not None else 0, channels), dtype=u.dtype)
    tensors = (u, state, change, input_vector, left, right, output_rows, skip, y)
    call(_library().linear_step, tensors, is_complex, silu, batch, filters * channels, channels, states)
    return y


def _fake(u, state, change, input_vector, left, right, output_rows, *_):
    return u.new_empty(state.shape[0], state.shape[1] if output_rows is not None else 0, state.shape[2])


_step = step_op("hf_hybrid_ssm::linear_step_native", _compute, _fake, changes=("state",))
