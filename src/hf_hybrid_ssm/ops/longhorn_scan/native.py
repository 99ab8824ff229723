"""The fused CPU backend: `native.c`, compiled on first use and called through two custom ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, filled, is_plain_call, step_op
from hf_hybrid_ssm.ops.core.native_library import (
    CFunction,
    contiguous,
    library_beside,
    prepared,
    supports,
    with_dense_rows,
)
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.pages import REFUSES, gathers_pages
from hf_hybrid_ssm.ops.longhorn_scan.heads import over_heads
from hf_hybrid_ssm.ops.longhorn_scan.reference import ScanInputs, needs_gradient, scan_flops

__all__ = ["longhorn_scan_native", "longhorn_step_native", "supports"]

# as in native.c
BLOCK = 32  # tokens from one kept state to the next
GROUP = 128  # channels of which the gradients of keys and queries are summed
VECTOR = 16  # channels of the longest vector

_library = library_beside(__file__)
_INPUTS = "x[B L D], beta_logit[B L D], k[B L N], q[B L N], z?[B L D], beta_bias?[D], skip?[D]"
FORWARD = CFunction(
    _library,
    "longhorn_forward",
    f"{_INPUTS}, initial?[B D N], seq_idx?[B L] int64, y[B L D], final[B D N], checkpoints[S]",
    "keep_checkpoints, B, L, D, N",
)
BACKWARD = CFunction(
    _library,
    "longhorn_backward",
    f"""{_INPUTS}, seq_idx?[B L] int64, checkpoints[S], dy[B L D], dfinal[B D N], dx[B L D], dbeta_logit[B L D],
    dk[G B L N], dq[G B L N], dz?[B L D], dbias[B D], dskip[B D], dinitial[B D N]""",
    "B, L, D, N",
)
STEP = CFunction(
    _library,
    "longhorn_step",
    """x[B* 1 D], beta_logit[B* 1 D], k[B* 1 N], q[B* 1 N], z?[B* 1 D], beta_bias?[D], skip?[D], state[P* D N],
    pages?[B] int64, y[B 1 D]""",
    "x.0, beta_logit.0, k.0, q.0, z.0, state.0, P, B, D, N",
    refuses=REFUSES,
)


@over_heads
def longhorn_scan_native(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; always returns the final state."""
    x, lengths = inputs.x, inputs.lengths
    sequences = (zero_beyond(part, lengths) for part in inputs[:3])
    floats: list[Any] = [prepared(tensor) for tensor in (*sequences, *inputs[3:8])]
    dense = ScanInputs(*floats)._replace(seq_idx=contiguous(inputs.seq_idx, torch.int64))
    keeps = needs_gradient(dense)
    forward: Callable = _forward if not keeps and is_plain_call(x) else lambda given: _scan(*given)
    y, final_state, _ = forward(dense._replace(keeps=keeps))
    return y.to(x.dtype), final_state


def _forward(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, L, D), final state (B, D, N), checkpoints; all inputs contiguous float32, seq_idx int64."""
    outputs = _fake(inputs)
    FORWARD((*inputs[:9], *outputs), inputs.keeps)
    return outputs


def _checkpoint_floats(x: Tensor, k: Tensor, keep_checkpoints: bool) -> int:
    """The states before every block, of channels in whole vectors, and a sum of squares for each token."""
    batch, length, channels = x.shape
    states = batch * -(-length // BLOCK) * -(-channels // VECTOR) * VECTOR * k.shape[2]
    return (states if keep_checkpoints else 0) + batch * length


def _fake(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    x, k = inputs.x, inputs.k
    final = x.new_empty(x.shape[0], x.shape[2], k.shape[2])
    return torch.empty_like(x), final, x.new_empty(_checkpoint_floats(x, k, inputs.keeps))


def _backward(
    inputs: ScanInputs, gradients: Sequence, needed: Sequence[bool], checkpoints: Tensor
) -> tuple[Tensor | None, ...]:
    """Of x, beta_logit, k, q, z, beta_bias, skip and the initial state."""
    x, k, z = inputs.x, inputs.k, inputs.z
    dy, dfinal = filled(gradients[:2], lambda: _fake(inputs))
    (batch, length, channels), states = x.shape, k.shape[-1]
    groups = -(-channels // GROUP)
    dx, dlogit, dz = torch.empty_like(x), torch.empty_like(x), None if z is None else torch.empty_like(x)
    dk, dq = x.new_empty(groups, batch, length, states), x.new_empty(groups, batch, length, states)
    dbias, dskip = x.new_empty(batch, channels), x.new_empty(batch, channels)
    dinitial = x.new_empty(batch, channels, states)
    results = (dx, dlogit, dk, dq, dz, dbias, dskip, dinitial)
    BACKWARD((*inputs[:7], inputs.seq_idx, checkpoints, dy, dfinal, *results))
    return dx, dlogit, dk.sum(0), dq.sum(0), dz, dbias.sum(0), dskip.sum(0), dinitial


_scan = differentiable_op(
    "hf_hybrid_ssm::longhorn_scan_native",
    ScanInputs,
    _forward,
    _backward,
    _fake,
    saved=lambda inputs, outputs: (inputs, outputs[2:]),
    device_types="cpu",
    flops=scan_flops,
)


@over_heads
def longhorn_step_native(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, D, N), or (P, D, N) with pages (B,)."""
    state, pages = inputs.state, inputs.pages
    assert state is not None
    if pages is not None and state.dtype != torch.float32:
        return gathers_pages(longhorn_step_native)(inputs)
    wide = state if state.dtype == torch.float32 else state.float()
    x, beta_logit, k, q, z = with_dense_rows(*inputs[:5])
    bias, skip = prepared(inputs.beta_bias), prepared(inputs.D)
    y = _step(ScanInputs(x, beta_logit, k, q, z, bias, skip, wide, None, None, pages))
    if wide is not state:
        state.copy_(wide)
    return y.to(inputs.x.dtype), state


def _compute_step(inputs: ScanInputs) -> Tensor:
    """y (B, 1, D); float32, of the first five and of the state the rows may lie apart."""
    y = torch.empty(inputs.x.shape, dtype=inputs.x.dtype)
    STEP((*inputs[:8], inputs.pages, y))
    return y


_step = step_op(
    "hf_hybrid_ssm::longhorn_step_native",
    _compute_step,
    lambda inputs: inputs.x.new_empty(inputs.x.shape),
    changes=("state",),
    inputs=ScanInputs,
)
