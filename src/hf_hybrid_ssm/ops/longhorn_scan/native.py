"""The fused CPU backend: `native.c`, compiled on first use and called through two custom ops."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops.core.native_library import (
    contiguous,
    is_plain_call,
    library_beside,
    prepared,
    step_op,
    supports,
    with_dense_rows,
)
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.pages import REFUSES, on_rows
from hf_hybrid_ssm.ops.longhorn_scan.flops import scan_flops
from hf_hybrid_ssm.ops.longhorn_scan.heads import over_heads, step_over_heads

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
def longhorn_scan_native(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    *,
    beta_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; always returns the final state."""
    sequences = (zero_beyond(part, lengths) for part in (x, beta_logit, k))
    inputs = [prepared(tensor) for tensor in (*sequences, q, z, beta_bias, D, initial_state)]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    forward: Callable = _forward if not keeps and is_plain_call(x) else _scan
    y, final_state, _ = forward(*inputs, contiguous(seq_idx, torch.int64), keeps)
    return y.to(x.dtype), final_state


def _forward(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor | None,
    beta_bias: Tensor | None,
    skip: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    keep_checkpoints: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, L, D), final state (B, D, N), checkpoints; all inputs contiguous float32, seq_idx int64."""
    y, final = torch.empty_like(x), x.new_empty(x.shape[0], x.shape[2], k.shape[2])
    checkpoints = x.new_empty(_checkpoint_floats(x, k, keep_checkpoints))
    tensors = (x, beta_logit, k, q, z, beta_bias, skip, initial_state, seq_idx, y, final, checkpoints)
    FORWARD(tensors, keep_checkpoints)
    return y, final, checkpoints


def _checkpoint_floats(x: Tensor, k: Tensor, keep_checkpoints: bool) -> int:
    """The states before every block, of channels in whole vectors, and a sum of squares for each token."""
    batch, length, channels = x.shape
    states = batch * -(-length // BLOCK) * -(-channels // VECTOR) * VECTOR * k.shape[2]
    return (states if keep_checkpoints else 0) + batch * length


def _fake(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor | None,
    beta_bias: Tensor | None,
    skip: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    keep_checkpoints: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    final = x.new_empty(x.shape[0], x.shape[2], k.shape[2])
    return torch.empty_like(x), final, x.new_empty(_checkpoint_floats(x, k, keep_checkpoints))


def _backward(inputs: Sequence, gradients: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of x, beta_logit, k, q, z, beta_bias, skip and the initial state."""
    *arrays, _, seq_idx, _, checkpoints = inputs
    x, _, k, _, z, _, _ = arrays
    dy, dfinal, _ = gradients
    (batch, length, channels), states = x.shape, k.shape[-1]
    groups = -(-channels // GROUP)
    dx, dlogit, dz = torch.empty_like(x), torch.empty_like(x), None if z is None else torch.empty_like(x)
    dk, dq = x.new_empty(groups, batch, length, states), x.new_empty(groups, batch, length, states)
    dbias, dskip = x.new_empty(batch, channels), x.new_empty(batch, channels)
    dinitial = x.new_empty(batch, channels, states)
    inputs_of_c = (*arrays, seq_idx, checkpoints, dy.contiguous(), dfinal.contiguous())
    BACKWARD((*inputs_of_c, dx, dlogit, dk, dq, dz, dbias, dskip, dinitial))
    return dx, dlogit, dk.sum(0), dq.sum(0), dz, dbias.sum(0), dskip.sum(0), dinitial


_scan = differentiable_op(
    "hf_hybrid_ssm::longhorn_scan_native",
    _forward,
    _backward,
    _fake,
    saved=lambda inputs, outputs: (inputs, outputs[2:]),
    device_types="cpu",
    flops=scan_flops,
)


@step_over_heads
def longhorn_step_native(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    state: Tensor,
    *,
    beta_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, D, N), or (P, D, N) with pages (B,)."""
    options = {"beta_bias": beta_bias, "D": D, "z": z}
    if pages is not None and state.dtype != torch.float32:
        return on_rows(lambda rows: longhorn_step_native(x, beta_logit, k, q, rows, **options)[0], state, pages), state
    wide = state if state.dtype == torch.float32 else state.float()
    y = _step(*with_dense_rows(x, beta_logit, k, q, z), prepared(beta_bias), prepared(D), wide, pages)
    if wide is not state:
        state.copy_(wide)
    return y.to(x.dtype), state


def _compute_step(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor | None,
    beta_bias: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
    pages: Tensor | None,
) -> Tensor:
    """y (B, 1, D); float32, of the first five and of the state the rows may lie apart."""
    y = torch.empty(x.shape, dtype=x.dtype)
    STEP((x, beta_logit, k, q, z, beta_bias, skip, state, pages, y))
    return y


_step = step_op(
    "hf_hybrid_ssm::longhorn_step_native", _compute_step, lambda x, *_: x.new_empty(x.shape), changes=("state",)
)
