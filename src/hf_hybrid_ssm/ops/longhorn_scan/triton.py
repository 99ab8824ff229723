"""The Longhorn scan on CUDA: launches of the Triton kernels, registered as torch.library ops with autograd.

Sizes of tiles depend on N alone, never on the length: a kernel is compiled once per set of dtypes and options.
"""

import math
from typing import List  # noqa: UP035

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops._core.lengths import zero_beyond
from hf_hybrid_ssm.ops._core.triton_helpers import (
    contiguous,
    dense_rows,
    device_guard,
    strides,
    supports,
    target_threads,
)
from hf_hybrid_ssm.ops.longhorn_scan import triton_kernels as kernels

__all__ = ["longhorn_scan_triton", "supports"]

BLOCK = 64  # tokens between checkpoints
CHAIN_BLOCK = 512


def longhorn_scan_triton(
    x, beta_logit, k, q, *, beta_bias=None, D=None, z=None, initial_state=None, seq_idx=None, lengths=None
):
    """As `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; always returns the final state."""
    if lengths is not None:  # a token with k = 0 leaves the state as it is
        x, beta_logit, k, q = (zero_beyond(t, lengths) for t in (x, beta_logit, k, q))
        z = None if z is None else zero_beyond(z, lengths)
    differentiable = (x, beta_logit, k, q, beta_bias, D, z, initial_state)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)
    o, final_state, _ = scan(*differentiable, seq_idx, save)
    return o, final_state


def time_splits(batch: int, channels: int, length: int, device: torch.device) -> int:
    """In how many programs to cut a row, so that batch · channels · splits lanes fill the GPU.

    A split costs a second pass over its tokens, so it has at least four blocks of them.
    """
    return max(1, min(math.ceil(target_threads(device) / (batch * channels)), length // (4 * BLOCK)))


def tile_sizes(num_states: int, *, backward: bool) -> dict[str, int]:
    """The tile [BN, BD] of a program: one warp, so that sums over either axis need neither barriers nor spilling.

    Compiled for sm_90 at N = 16, the kernels take 124 and 253 of a lane's 255 registers; a lane of the backward kernel
    holds one channel, as it keeps the states of S tokens at once.
    """
    states = max(2, triton.next_power_of_2(num_states))
    sizes = {"BN": states, "BD": 64 if states <= 16 and not backward else 32, "num_warps": 1, "enable_fp_fusion": True}
    return sizes | {"S": max(1, min(4, 64 // states))} if backward else sizes


@torch.library.custom_op("hf_hybrid_ssm::longhorn_scan_triton", mutates_args=())
def scan(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    beta_bias: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ output (B, L, D), final state (B, D, N), and with `save` the checkpoints (B, L / BLOCK, N, D), else empty."""
    (batch, length, channels), num_states = x.shape, k.shape[-1]
    x, beta_logit, k, q, z = dense_rows(x, beta_logit, k, q, z)
    beta_bias, D, seq_idx = contiguous(beta_bias, D, seq_idx)
    blocks = triton.cdiv(length, BLOCK)
    o = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = {"dtype": torch.float32, "device": x.device}
    final_state = torch.empty(batch, channels, num_states, **state)
    checkpoints = torch.empty((batch, blocks, num_states, channels) if save else (0,), **state)
    if final_state.numel() == 0 or length == 0:
        final_state = torch.zeros_like(final_state) if initial_state is None else initial_state.float().clone()
        return o, final_state, checkpoints
    states = None if initial_state is None else initial_state.float().transpose(1, 2).contiguous()
    splits = time_splits(batch, channels, length, x.device)
    sizes, flags = tile_sizes(num_states, backward=False), _flags(beta_bias, seq_idx)
    shape = (length, channels, num_states, blocks, triton.cdiv(blocks, splits))
    grid = (triton.cdiv(channels, sizes["BD"]), splits, batch)
    with device_guard(x):
        if splits > 1:
            products, ends = (torch.empty(batch, splits, num_states, channels, **state) for _ in range(2))
            kernels.forward_summary_kernel[grid](
                x, beta_logit, k, beta_bias, seq_idx, products, ends,
                *strides(x, beta_logit, k), *shape, **flags, **sizes, T=BLOCK,
            )  # fmt: skip
            states = _chain(products, ends, states, reverse=False)
        kernels.forward_kernel[grid](
            x, beta_logit, z, k, q, beta_bias, D, seq_idx, states, o, final_state, checkpoints,
            *strides(x, beta_logit, z, k, q), *shape, **flags, **sizes, T=BLOCK,
            HAS_SKIP=D is not None, HAS_GATE=z is not None, HAS_STATES=states is not None, SAVE=save,
        )  # fmt: skip
    return o, final_state, checkpoints


@scan.register_fake
def _(x, beta_logit, k, q, beta_bias, D, z, initial_state, seq_idx, save):
    (batch, length, channels), num_states = x.shape, k.shape[-1]
    state = {"dtype": torch.float32, "device": x.device}
    checkpoints = (batch, (length + BLOCK - 1) // BLOCK, num_states, channels) if save else (0,)
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(batch, channels, num_states, **state),
        torch.empty(checkpoints, **state),
    )


@torch.library.custom_op("hf_hybrid_ssm::longhorn_scan_triton_backward", mutates_args=())
def scan_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    beta_bias: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    seq_idx: Tensor | None,
    checkpoints: Tensor,
) -> List[Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """→ gradients of x, beta_logit, k, q, beta_bias, D, z and the initial state; empty ones for absent arguments."""
    (batch, length, channels), num_states = x.shape, k.shape[-1]
    x, beta_logit, k, q, z, grad_o = dense_rows(x, beta_logit, k, q, z, grad_o)
    beta_bias, D, seq_idx = contiguous(beta_bias, D, seq_idx)
    blocks = triton.cdiv(length, BLOCK)
    splits = time_splits(batch, channels, length, x.device) if x.numel() else 1
    sizes, flags = tile_sizes(num_states, backward=True), _flags(beta_bias, seq_idx)
    tiles = triton.cdiv(channels, sizes["BD"])
    state = {"dtype": torch.float32, "device": x.device}
    dx, dlogit, dz = (
        torch.empty(t.shape if t is not None else (0,), dtype=x.dtype, device=x.device) for t in (x, beta_logit, z)
    )
    dk_parts, dq_parts = (torch.empty(tiles, batch, length, num_states, **state) for _ in range(2))
    dbias, dskip = (
        torch.empty((batch * splits, channels) if t is not None else (0,), **state) for t in (beta_bias, D)
    )
    dinitial = torch.empty(batch, channels, num_states, **state)
    if dinitial.numel() == 0 or length == 0:
        dinitial = torch.zeros_like(dinitial) if grad_final_state is None else grad_final_state.float().clone()
        splits = 0
        dbias, dskip = dbias[:0], dskip[:0]
    else:
        grad_states = None if grad_final_state is None else grad_final_state.float().transpose(1, 2).contiguous()
        scratch = torch.empty(batch * splits * tiles * (BLOCK // sizes["S"]) * sizes["BN"] * sizes["BD"], **state)
        shape = (length, channels, num_states, blocks, triton.cdiv(blocks, splits))
        grid = (tiles, splits, batch)
        with device_guard(x):
            if splits > 1:
                summary_sizes = {key: size for key, size in sizes.items() if key != "S"}
                products, ends = (torch.empty(batch, splits, num_states, channels, **state) for _ in range(2))
                kernels.backward_summary_kernel[grid](
                    beta_logit, z, k, q, grad_o, beta_bias, seq_idx, products, ends,
                    *strides(beta_logit, z, k, q, grad_o), *shape, **flags, **summary_sizes, T=BLOCK,
                    HAS_GATE=z is not None,
                )  # fmt: skip
                grad_states = _chain(products, ends, grad_states, reverse=True)
            kernels.backward_kernel[grid](
                x, beta_logit, z, k, q, grad_o, beta_bias, D, seq_idx, checkpoints, grad_states, scratch,
                dx, dlogit, dz, dk_parts, dq_parts, dbias, dskip, dinitial,
                *strides(x, beta_logit, z, k, q, grad_o), *shape, **flags, **sizes, T=BLOCK,
                HAS_SKIP=D is not None, HAS_GATE=z is not None, HAS_GRAD_STATES=grad_states is not None,
            )  # fmt: skip
    dk, dq = dk_parts.sum(0).to(k.dtype), dq_parts.sum(0).to(q.dtype)
    return [dx, dlogit, dk, dq, *(t.sum(0) if t.dim() == 2 else t for t in (dbias, dskip)), dz, dinitial]


@scan_backward.register_fake
def _(grad_o, grad_final_state, x, beta_logit, k, q, beta_bias, D, z, seq_idx, checkpoints):
    state = {"dtype": torch.float32, "device": x.device}
    dense = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, beta_logit, k, q)]
    sums = [torch.empty((x.shape[-1],) if t is not None else (0,), **state) for t in (beta_bias, D)]
    dz = torch.empty(z.shape if z is not None else (0,), dtype=x.dtype, device=x.device)
    return [*dense, *sums, dz, torch.empty(x.shape[0], x.shape[-1], k.shape[-1], **state)]


def _save_for_backward(ctx, inputs, output) -> None:
    x, beta_logit, k, q, beta_bias, D, z, initial_state, seq_idx, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if t is None else t.dtype for t in (beta_bias, D, z, initial_state)]
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(x, beta_logit, k, q, beta_bias, D, z, seq_idx, output[2])


def _backward(ctx, grad_o, grad_final_state, _):
    x = ctx.saved_tensors[0]
    if grad_o is None:
        grad_o = torch.zeros_like(x)
    *dense, dbias, dskip, dz, dinitial = scan_backward(grad_o, grad_final_state, *ctx.saved_tensors)
    optional = zip((dbias, dskip, dz, dinitial), ctx.dtypes)
    return *dense, *(None if dtype is None else grad.to(dtype) for grad, dtype in optional), None, None


scan.register_autograd(_backward, setup_context=_save_for_backward)


def _chain(products: Tensor, ends: Tensor, states: Tensor | None, *, reverse: bool) -> Tensor:
    """The state that enters each split, (B, splits, N, D)."""
    batch, splits, num_states, channels = products.shape
    initial_states = torch.empty_like(products)
    kernels.chain_kernel[(triton.cdiv(num_states * channels, CHAIN_BLOCK), batch)](
        products, ends, states, initial_states, num_states * channels, splits,
        HAS_STATE=states is not None, REVERSE=reverse, BLOCK=CHAIN_BLOCK,
    )  # fmt: skip
    return initial_states


def _flags(beta_bias: Tensor | None, seq_idx: Tensor | None) -> dict[str, bool]:
    return {"HAS_BIAS": beta_bias is not None, "HAS_DOCUMENTS": seq_idx is not None}
