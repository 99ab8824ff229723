"""The fused CPU backend of a step: `native_step.c`, called directly or through a custom op."""

from typing import Any

from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import step_op
from hf_hybrid_ssm.ops.core.native_library import CFunction, library_beside, prepared, supports
from hf_hybrid_ssm.ops.linear_scan.reference import StepInputs

__all__ = ["linear_step_native", "supports"]

STEP = CFunction(
    library_beside(__file__),
    "linear_step",
    """u[B 1 D], state[B F D N], decay_minus_one[F D N], input[F D N], left?[F D N], right?[F D N], output?[F D N],
    skip?[F D], y?[B 1 F D]""",
    "is_complex, silu, B, F*D, D, N",
)


def linear_step_native(inputs: StepInputs) -> tuple[Tensor | None, Tensor]:
    """As `hf_hybrid_ssm.ops.linear_scan.lti_token`."""
    dense: Any = map(prepared, inputs[:8])
    u, state, a, b, left, right, rows, skip = dense
    y = _step(StepInputs(u, state, a, b, left, right, rows, skip, inputs.is_complex, inputs.silu))
    if state is not inputs.state:
        inputs.state.copy_(state)
    return None if rows is None else y.to(inputs.u.dtype), inputs.state


def _compute(inputs: StepInputs) -> Tensor:
    """y (B, 1, F, D), empty without output rows; all contiguous float32."""
    y = _empty(inputs)
    STEP((*inputs[:8], y if inputs.output_rows is not None else None), inputs.is_complex, inputs.silu)
    return y


def _empty(inputs: StepInputs) -> Tensor:
    batch, filters, channels, _ = inputs.state.shape
    return inputs.u.new_empty((batch, 1, 0 if inputs.output_rows is None else filters, channels))


_step = step_op("hf_hybrid_ssm::linear_step_native", _compute, _empty, changes=("state",), inputs=StepInputs)
