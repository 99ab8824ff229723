"""The fused CPU backend: `native.c`, compiled on first use and called through two custom ops."""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from hf_hybrid_ssm.ops._core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops._core.native_library import (
    address,
    call,
    is_plain_call,
    library_beside,
    prepared,
    prepared_rows,
    step_op,
    supports,
)
from hf_hybrid_ssm.ops._core.rows import zero_beyond

__all__ = ["longhorn_scan_native", "longhorn_step_native", "supports"]


def longhorn_scan_native(
    x, beta_logit, k, q, *, beta_bias=None, D=None, z=None, initial_state=None, seq_idx=None, lengths=None
):
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; always returns the final state."""
    sequences = (zero_beyond(part, lengths) for part in (x, beta_logit, k))
    inputs = [prepared(tensor) for tensor in (*sequences, q, z, beta_bias, D, initial_state)]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    forward: Callable = _forward if not keeps and is_plain_call(x) else _scan
    y, final_state, _ = forward(*inputs, None if seq_idx is None else seq_idx.long().contiguous(), keeps)
    return y.to(x.dtype), final_state


_compiled = library_beside(__file__)


@cache
def _library() -> ctypes.CDLL:
    library = _compiled()
    library.longhorn_checkpoint_size.restype = ctypes.c_int64
    library.longhorn_groups.restype = ctypes.c_int64
    return library


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
    batch, length, channels = x.shape
    sizes = (*x.shape, k.shape[-1])
    y, final = torch.empty_like(x), x.new_empty(batch, channels, k.shape[-1])
    floats = batch * length
    if keep_checkpoints:
        floats = _library().longhorn_checkpoint_size(*map(ctypes.c_int64, sizes))
    checkpoints = x.new_empty(floats)
    tensors = (x, beta_logit, k, q, z, beta_bias, skip, initial_state, seq_idx, y, final, checkpoints)
    call(_library().longhorn_forward, tensors, keep_checkpoints, *sizes)
    return y, final, checkpoints


def _fake(x, beta_logit, k, q, z, beta_bias, skip, initial_state, seq_idx, keep_checkpoints):
    batch, length, channels = x.shape
    blocks, tiles = (length + 31) // 32, (channels + 15) // 16
    saved = batch * blocks * tiles * k.shape[-1] * 16 if keep_checkpoints else 0
    final = x.new_empty(batch, channels, k.shape[-1])
    return torch.empty_like(x), final, x.new_empty(saved + batch * length)


def _backward(inputs, gradients, needed):
    """Of x, beta_logit, k, q, z, beta_bias, skip and the initial state."""
    *arrays, _, seq_idx, _, checkpoints = inputs
    x, _, k, _, z, _, _ = arrays
    dy, dfinal, _ = gradients
    (batch, length, channels), states = x.shape, k.shape[-1]
    groups = _library().longhorn_groups(ctypes.c_int64(channels))
    dx, dlogit, dz = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x if z is not None else x[:0])
    dk, dq = x.new_empty(groups, batch, length, states), x.new_empty(groups, batch, length, states)
    dbias, dskip = x.new_empty(batch, channels), x.new_empty(batch, channels)
    dinitial = x.new_empty(batch, channels, states)
    given = (*arrays, seq_idx, checkpoints, dy.contiguous(), dfinal.contiguous())
    call(_library().longhorn_backward, (*given, dx, dlogit, dk, dq, dz, dbias, dskip, dinitial), *x.shape, states)
    return dx, dlogit, dk.sum(0), dq.sum(0), dz, dbias.sum(0), dskip.sum(0), dinitial


_scan = differentiable_op(
    "hf_hybrid_ssm::longhorn_scan_native",
    _forward,
    _backward,
    _fake,
    saved=lambda inputs, outputs: (inputs, outputs[2:]),
    device_types="cpu",
)


def longhorn_step_native(x, beta_logit, k, q, state, *, beta_bias=None, D=None, z=None):
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_step`."""
    rows = (prepared_rows(part) for part in (x, beta_logit, k, q, z))
    wide = prepared(state)
    y = _step(*rows, prepared(beta_bias), prepared(D), wide)
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
) -> Tensor:
    """y (B, D); float32, of the first five the rows may lie apart."""
    y = torch.empty(x.shape, dtype=x.dtype)
    rows = (x, beta_logit, k, q, z)
    rows_at = (None if part is None else address(part, is_strided=True) for part in rows)
    apart = (0 if part is None else part.stride(0) for part in rows)
    call(_library().longhorn_step, (*rows_at, beta_bias, skip, state, y), *apart, *state.shape)
    return y


_step = step_op(
    "hf_hybrid_ssm::longhorn_step_native", _compute_step, lambda x, *_: x.new_empty(x.shape), changes=("state",)
)
