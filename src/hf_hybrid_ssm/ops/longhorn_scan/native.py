"""The fused CPU backend: `native.c`, compiled on first use and called through two custom ops."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import List  # noqa: UP035

import torch
from torch import Tensor

from hf_hybrid_ssm.ops._core.native_library import (
    address,
    call,
    compile_and_load,
    is_plain_call,
    prepared,
    prepared_rows,
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
    forward: Callable = _compute if not keeps and is_plain_call(x) else _forward
    y, final_state, _ = forward(*inputs, None if seq_idx is None else seq_idx.long().contiguous(), keeps)
    return y.to(x.dtype), final_state


@cache
def _library() -> ctypes.CDLL:
    library = compile_and_load(Path(__file__).with_name("native.c"))
    library.longhorn_checkpoint_size.restype = ctypes.c_int64
    library.longhorn_groups.restype = ctypes.c_int64
    return library


def _compute(
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


_forward = torch.library.custom_op(
    "hf_hybrid_ssm::longhorn_scan_native", _compute, mutates_args=(), device_types="cpu"
)


@_forward.register_fake
def _(x, beta_logit, k, q, z, beta_bias, skip, initial_state, seq_idx, keep_checkpoints):
    batch, length, channels = x.shape
    blocks, tiles = (length + 31) // 32, (channels + 15) // 16
    saved = batch * blocks * tiles * k.shape[-1] * 16 if keep_checkpoints else 0
    final = x.new_empty(batch, channels, k.shape[-1])
    return torch.empty_like(x), final, x.new_empty(saved + batch * length)


@torch.library.custom_op("hf_hybrid_ssm::longhorn_scan_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor | None,
    beta_bias: Tensor | None,
    skip: Tensor | None,
    seq_idx: Tensor | None,
    checkpoints: Tensor,
    dy: Tensor,
    dfinal: Tensor,
) -> List[Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """Gradients of x, beta_logit, k, q, z (empty without a gate), beta_bias, skip and the initial state."""
    (batch, length, channels), states = x.shape, k.shape[-1]
    groups = _library().longhorn_groups(ctypes.c_int64(channels))
    dx, dlogit, dz = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x if z is not None else x[:0])
    dk, dq = x.new_empty(groups, batch, length, states), x.new_empty(groups, batch, length, states)
    dbias, dskip = x.new_empty(batch, channels), x.new_empty(batch, channels)
    dinitial = x.new_empty(batch, channels, states)
    inputs = (x, beta_logit, k, q, z, beta_bias, skip, seq_idx, checkpoints, dy, dfinal)
    call(_library().longhorn_backward, (*inputs, dx, dlogit, dk, dq, dz, dbias, dskip, dinitial), *x.shape, states)
    return [dx, dlogit, dk.sum(0), dq.sum(0), dz, dbias.sum(0), dskip.sum(0), dinitial]


@_backward.register_fake
def _(x, beta_logit, k, q, z, beta_bias, skip, seq_idx, checkpoints, dy, dfinal):
    channels, states = x.shape[-1], k.shape[-1]
    dz = torch.empty_like(x if z is not None else x[:0])
    gradients = (torch.empty_like(x), torch.empty_like(x), torch.empty_like(k), torch.empty_like(k), dz)
    return [*gradients, x.new_empty(channels), x.new_empty(channels), x.new_empty(x.shape[0], channels, states)]


def _setup_context(ctx, inputs, output):
    *tensors, initial_state, seq_idx, _ = inputs
    ctx.save_for_backward(*tensors, seq_idx, output[2])
    ctx.has_initial_state = initial_state is not None


def _gradient(ctx, dy, dfinal, _):
    saved = ctx.saved_tensors  # once: checkpointing unpacks them once
    *dense, dz, dbias, dskip, dinitial = _backward(*saved, dy.contiguous(), dfinal.contiguous())
    is_given = (*(tensor is not None for tensor in saved[4:7]), ctx.has_initial_state)
    optional = (grad if given else None for grad, given in zip((dz, dbias, dskip, dinitial), is_given))
    return *dense, *optional, None, None


_forward.register_autograd(_gradient, setup_context=_setup_context)


def longhorn_step_native(x, beta_logit, k, q, state, *, beta_bias=None, D=None, z=None):
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_step`."""
    rows = (prepared_rows(part) for part in (x, beta_logit, k, q, z))
    wide = prepared(state)
    step: Callable = _compute_step if is_plain_call(x) else _step
    y = step(*rows, prepared(beta_bias), prepared(D), wide)
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


_step = torch.library.custom_op(
    "hf_hybrid_ssm::longhorn_step_native", _compute_step, mutates_args=("state",), device_types="cpu"
)


@_step.register_fake
def _(x, beta_logit, k, q, z, beta_bias, skip, state):
    return x.new_empty(x.shape)
