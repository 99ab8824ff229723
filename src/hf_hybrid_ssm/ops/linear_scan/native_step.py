"""The fused CPU backend of a step: `native_step.c`, called directly or through a custom op."""

from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.native_library import library_beside, prepared, step_op, supports

__all__ = ["linear_step_native", "supports"]

STEP = CFunction(
    library_beside(__file__),
    "linear_step",
    """u[B 1 D], state[B F D N], decay_minus_one[F D N], input[F D N], left?[F D N], right?[F D N], output?[F D N],
    skip?[F D], y?[B 1 F D]""",
    "is_complex, silu, B, F*D, D, N",
)


def linear_step_native(
    u: Tensor,
    state: Tensor,
    decay_minus_one: Tensor,
    input_vector: Tensor,
    *,
    output_rows: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    skip: Tensor | None,
    is_complex: bool,
    silu: bool,
) -> tuple[Tensor | None, Tensor]:
    """As `hf_hybrid_ssm.ops.linear_scan.lti_token`."""
    wide = prepared(state)
    left, right = low_rank or (None, None)
    constants = map(prepared, (decay_minus_one, input_vector, left, right, output_rows, skip))
    y = _step(prepared(u), wide, *constants, is_complex, silu)
    if wide is not state:
        state.copy_(wide)
    return None if output_rows is None else y.to(u.dtype), state


def _compute(
    u: Tensor,
    state: Tensor,
    decay_minus_one: Tensor,
    input_vector: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    output_rows: Tensor | None,
    skip: Tensor | None,
    is_complex: bool,
    silu: bool,
) -> Tensor:
    """y (B, 1, F, D), empty without output rows; all contiguous float32."""
    batch, filters, channels, _ = state.shape
    is_read = output_rows is not None
    y = torch.empty((batch, 1, filters if is_read else 0, channels), dtype=u.dtype)
    constants = (decay_minus_one, input_vector, left, right, output_rows, skip)
    STEP((u, state, *constants, y if is_read else None), is_complex, silu)
    return y


def _fake(
    u: Tensor,
    state: Tensor,
    decay_minus_one: Tensor,
    input_vector: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    output_rows: Tensor | None,
    *_: Any,
) -> Tensor:
    return u.new_empty(state.shape[0], 1, state.shape[1] if output_rows is not None else 0, state.shape[2])


_step = step_op("hf_hybrid_ssm::linear_step_native", _compute, _fake, changes=("state",))
