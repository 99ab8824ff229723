"""The fused CPU backend: `native.c`, compiled on first use, behind two custom ops."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import List  # noqa: UP035

import torch

from hf_hybrid_ssm.ops._core.lengths import zero_beyond
from hf_hybrid_ssm.ops._core.native_library import compile_and_load, pointer, supports

__all__ = ["run", "supports"]


@cache
def _library() -> ctypes.CDLL:
    library = compile_and_load(Path(__file__).with_name("native.c"))
    library.longhorn_checkpoint_size.restype = ctypes.c_int64
    library.longhorn_groups.restype = ctypes.c_int64
    return library


def _sizes(x: torch.Tensor, k: torch.Tensor) -> list[ctypes.c_int64]:
    return [ctypes.c_int64(size) for size in (*x.shape, k.shape[-1])]


def _checkpoint_floats(x: torch.Tensor, k: torch.Tensor) -> int:
    return _library().longhorn_checkpoint_size(*_sizes(x, k))


def _compute(
    x: torch.Tensor,
    dt: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    keep_checkpoints: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y (B, L, D), final state (B, D, N), checkpoints; all inputs contiguous float32, seq_idx int64."""
    batch, length, channels = x.shape
    y, final = torch.empty_like(x), x.new_empty(batch, channels, k.shape[-1])
    checkpoints = x.new_empty(_checkpoint_floats(x, k) if keep_checkpoints else batch * length)
    failed = _library().longhorn_forward(
        *map(pointer, (x, dt, k, q, z, dt_bias, skip, initial_state, seq_idx, y, final, checkpoints)),
        ctypes.c_int(keep_checkpoints),
        *_sizes(x, k),
        ctypes.c_int(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("longhorn_scan ran out of memory for its channel states.")
    return y, final, checkpoints


_forward = torch.library.custom_op(
    "hf_hybrid_ssm::longhorn_scan_native", _compute, mutates_args=(), device_types="cpu"
)


@_forward.register_fake
def _(x, dt, k, q, z, dt_bias, skip, initial_state, seq_idx, keep_checkpoints):
    batch, length, channels = x.shape
    blocks, tiles = (length + 31) // 32, (channels + 15) // 16
    saved = batch * blocks * tiles * k.shape[-1] * 16 if keep_checkpoints else 0
    return (
        torch.empty_like(x),
        x.new_empty(batch, channels, k.shape[-1]),
        x.new_empty(saved + batch * length),
    )


@torch.library.custom_op("hf_hybrid_ssm::longhorn_scan_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    x: torch.Tensor,
    dt: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    skip: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    checkpoints: torch.Tensor,
    dy: torch.Tensor,
    dfinal: torch.Tensor,
) -> List[torch.Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """dx, ddt, dk, dq, dz, d dt_bias, d skip, d initial_state (dz is empty without a gate)."""
    (batch, length, channels), states = x.shape, k.shape[-1]
    groups = _library().longhorn_groups(ctypes.c_int64(channels))
    dx, ddt, dz = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x if z is not None else x[:0])
    dk, dq = x.new_empty(groups, batch, length, states), x.new_empty(groups, batch, length, states)
    dbias, dskip = x.new_empty(batch, channels), x.new_empty(batch, channels)
    dinitial = x.new_empty(batch, channels, states)
    failed = _library().longhorn_backward(
        *map(pointer, (x, dt, k, q, z, dt_bias, skip, seq_idx, checkpoints, dy, dfinal)),
        *map(pointer, (dx, ddt, dk, dq, dz, dbias, dskip, dinitial)),
        *_sizes(x, k),
        ctypes.c_int(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("longhorn_scan ran out of memory for its channel states.")
    return [dx, ddt, dk.sum(0), dq.sum(0), dz, dbias.sum(0), dskip.sum(0), dinitial]


@_backward.register_fake
def _(x, dt, k, q, z, dt_bias, skip, seq_idx, checkpoints, dy, dfinal):
    channels, states = x.shape[-1], k.shape[-1]
    dz = torch.empty_like(x if z is not None else x[:0])
    gradients = (torch.empty_like(x), torch.empty_like(x), torch.empty_like(k), torch.empty_like(k), dz)
    return [*gradients, x.new_empty(channels), x.new_empty(channels), x.new_empty(x.shape[0], channels, states)]


def _setup_context(ctx, inputs, output):
    *tensors, initial_state, seq_idx, _ = inputs
    ctx.save_for_backward(*tensors, seq_idx, output[2])
    ctx.has_initial_state = initial_state is not None


def _gradient(ctx, dy, dfinal, dcheckpoints):
    x, dt, k, q, z, dt_bias, skip, seq_idx, checkpoints = ctx.saved_tensors
    dy, dfinal = dy.contiguous(), dfinal.contiguous()
    dx, ddt, dk, dq, dz, dbias, dskip, dinitial = _backward(
        x, dt, k, q, z, dt_bias, skip, seq_idx, checkpoints, dy, dfinal
    )
    return (
        dx,
        ddt,
        dk,
        dq,
        None if z is None else dz,
        None if dt_bias is None else dbias,
        None if skip is None else dskip,
        dinitial if ctx.has_initial_state else None,
        None,
        None,
    )


_forward.register_autograd(_gradient, setup_context=_setup_context)


def _prepared(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def run(
    x: torch.Tensor,
    dt: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; always returns the final state."""
    tensors = (*(zero_beyond(part, lengths) for part in (x, dt, k)), q, z, dt_bias, D, initial_state)
    inputs = [_prepared(tensor) for tensor in tensors]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    # while decoding, torch.library's way to the same function takes longer than the function
    is_plain = not keeps and type(x) is torch.Tensor and not torch.compiler.is_compiling()
    forward: Callable = _compute if is_plain else _forward
    y, final_state, _ = forward(*inputs, None if seq_idx is None else seq_idx.long().contiguous(), keeps)
    return y.to(x.dtype), final_state
