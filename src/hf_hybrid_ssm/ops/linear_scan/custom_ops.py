"""The two scans as torch.library ops with fake implementations and gradients, for every backend that has kernels."""

from collections.abc import Callable
from typing import List  # noqa: UP035

import torch
from torch import Tensor


def channel_op(backend: str, forward: Callable, backward: Callable, device_types: str | None = None) -> Callable:
    """The op of a backend that computes, for a diagonal transition,

        forward: y (B, L, F, D) in float32 and the final state (B, F, D, N);
        backward: from dy and dfinal also, the gradients of u, decay, vector, output (meaningless unless the system
            `trains`), skip and the initial state.

    Both take u in float32 and the decay in float64; `seq_idx` and `lengths` are int64.
    """

    def run(
        u: Tensor,
        decay: Tensor,
        vector: Tensor,
        output: Tensor,
        skip: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        lengths: Tensor | None,
        is_complex: bool,
    ) -> tuple[Tensor, Tensor]:
        return forward(u, decay, vector, output, skip, initial_state, seq_idx, lengths, is_complex)

    def differentiate(
        u: Tensor,
        decay: Tensor,
        vector: Tensor,
        output: Tensor,
        skip: Tensor | None,
        initial_state: Tensor | None,
        seq_idx: Tensor | None,
        lengths: Tensor | None,
        dy: Tensor,
        dfinal: Tensor,
        is_complex: bool,
        trains: bool,
    ) -> List[Tensor]:  # noqa: UP006 - all that torch 2.6 reads
        tensors = (u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal)
        return backward(*tensors, is_complex, trains)

    def save(ctx, inputs, output):
        *tensors, ctx.is_complex = inputs
        ctx.save_for_backward(*tensors)

    def gradient(ctx, dy, dfinal):
        needs = ctx.needs_input_grad
        saved = (*ctx.saved_tensors, dy.contiguous(), dfinal.contiguous())
        gradients = op_backward(*saved, ctx.is_complex, any(needs[1:4]))
        return *(gradient if needed else None for gradient, needed in zip(gradients, needs)), None, None, None

    name = f"hf_hybrid_ssm::channel_scan_{backend}"
    op = torch.library.custom_op(name, run, mutates_args=(), device_types=device_types)
    op_backward = torch.library.custom_op(
        f"{name}_backward", differentiate, mutates_args=(), device_types=device_types
    )
    op.register_fake(_fake_channel)
    op_backward.register_fake(_fake_channel_backward)
    op.register_autograd(gradient, setup_context=save)
    return op


def _fake_channel(u, decay, vector, output, skip, initial_state, seq_idx, lengths, is_complex):
    (batch, length, channels), (filters, _, size) = u.shape, output.shape
    return u.new_empty(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)


def _fake_channel_backward(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, dy, dfinal, is_complex, trains
):
    dskip = u.new_empty(output.shape[:2])
    return [*(torch.empty_like(tensor) for tensor in (u, decay, vector, output)), dskip, torch.empty_like(dfinal)]


def diagonal_op(backend: str, forward: Callable, backward: Callable, device_types: str | None = None) -> Callable:
    """The op of a backend that computes

    forward: h, of x's shape (B, L, M) or (B, L, M, 2), float32;
    backward: from dh and h, the gradients of x, the decay (M) or (M, 2), float64, and the initial state.
    """

    def run(x: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> Tensor:
        return forward(x, decay, initial_state, seq_idx)

    def differentiate(
        dh: Tensor, h: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(dh, h, decay, initial_state, seq_idx)

    def save(ctx, inputs, output):
        _, decay, initial_state, seq_idx = inputs
        ctx.save_for_backward(output, decay, initial_state, seq_idx)

    def gradient(ctx, dh):
        gradients = op_backward(dh.contiguous(), *ctx.saved_tensors)
        return *(gradient if needed else None for gradient, needed in zip(gradients, ctx.needs_input_grad)), None

    name = f"hf_hybrid_ssm::diagonal_scan_{backend}"
    op = torch.library.custom_op(name, run, mutates_args=(), device_types=device_types)
    op_backward = torch.library.custom_op(
        f"{name}_backward", differentiate, mutates_args=(), device_types=device_types
    )
    op.register_fake(lambda x, decay, initial_state, seq_idx: torch.empty_like(x))
    op_backward.register_fake(
        lambda dh, h, decay, initial_state, seq_idx: (
            torch.empty_like(h),
            torch.empty_like(decay),
            h.new_empty(h.shape[0], *h.shape[2:]),
        )
    )
    op.register_autograd(gradient, setup_context=save)
    return op


def run_channel_op(op: Callable, u: Tensor, decay: Tensor, *tensors: Tensor | None, is_complex: bool) -> tuple:
    """`op` on what it takes, of tensors in any form."""
    *floats, seq_idx, lengths = tensors
    inputs = (_dense(u, torch.float32), _dense(decay, torch.float64), *(_dense(t, torch.float32) for t in floats))
    y, final = op(*inputs, _dense(seq_idx, torch.int64), _dense(lengths, torch.int64), is_complex)
    return y.to(u.dtype), final


def run_diagonal_op(
    op: Callable, decay: Tensor, x: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None
) -> Tensor:
    inputs = (_dense(x, torch.float32), _dense(decay, torch.float64), _dense(initial_state, torch.float32))
    return op(*inputs, _dense(seq_idx, torch.int64)).to(x.dtype)


def _dense(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()
