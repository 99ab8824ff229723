"""The two scans as torch.library ops, for every backend that has kernels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops.core.output_positions import OutputPositions
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import BlockMatrices, lti_scan_torch


def channel_op(name: str, forward: Callable, backward: Callable, device_types: str | None = None) -> Callable:
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
        inputs: Sequence, gradients: Sequence[Tensor], needed: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        *tensors, is_complex = inputs
        return backward(*tensors, *(part.contiguous() for part in gradients), is_complex, any(needed[1:4]))

    def fake(u: Tensor, decay: Tensor, vector: Tensor, output: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        (batch, length, channels), (filters, _, size) = u.shape, output.shape
        return u.new_empty(batch, length, filters, channels), u.new_empty(batch, filters, channels, size)

    return differentiable_op(name, run, differentiate, fake, device_types=device_types, flops=_lti_flops)


def diagonal_op(name: str, forward: Callable, backward: Callable, device_types: str | None = None) -> Callable:
    """The op of a backend that computes

    forward: h, of x's shape (B, L, M) or (B, L, M, 2), float32;
    backward: from dh and h, the gradients of x, the decay (M) or (M, 2), float64, and the initial state.
    """

    def run(x: Tensor, decay: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> Tensor:
        return forward(x, decay, initial_state, seq_idx)

    return differentiable_op(
        name,
        run,
        lambda inputs, gradients, needed: backward(gradients[0].contiguous(), *inputs),
        fake=lambda x, *_: x.new_empty(x.shape),
        saved=lambda inputs, h: ((h, *inputs[1:]), ()),
        device_types=device_types,
        flops=_diagonal_flops,
    )


def _lti_flops(u: Any, decay: Any, vector: Any, *_: Any) -> int:
    """Each real number of the state: decay (1, of a complex number 3), written value (2), read-out (2)."""
    is_complex = len(decay) > len(vector)
    return (7 if is_complex else 5) * u[0] * u[1] * math.prod(vector)


def _diagonal_flops(x: Any, decay: Any, *_: Any) -> int:
    """Each real number of the state: decay (1, of a complex number 3), input (1)."""
    return (4 if len(decay) == 2 else 2) * math.prod(x)


def lti_scan_by(op: Callable) -> Callable:
    """`lti_scan_torch` by a `channel_op`; torch takes over dense transitions.

    Outputs at some tokens only are taken of all of them. The block matrices of many filters that train would cost
    more; those of constant filters are known already, and their products are faster.
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
        return_final_state: bool,
        wanted: OutputPositions,
        *,
        form: str,
        blocks: BlockMatrices | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = (u, decay, vector, output, skip, initial_state, seq_idx, lengths)
        trains = torch.is_grad_enabled() and any(part.requires_grad for part in (decay, vector, output))
        if form == "dense" or not (wanted.is_all or trains):
            return lti_scan_torch(*tensors, return_final_state, wanted, form=form, blocks=blocks)
        decay = decay.expand(*vector.shape[:2], *decay.shape[-2 if form == "complex" else -1 :])
        floats = (_dense(part, torch.float32) for part in (vector, output, skip, initial_state))
        integers = (_dense(part, torch.int64) for part in (seq_idx, lengths))
        y, final = op(_dense(u, torch.float32), _dense(decay, torch.float64), *floats, *integers, form == "complex")
        return wanted.take(y).to(u.dtype), final if return_final_state else None

    return run


def diagonal_scan_by(op: Callable) -> Callable:
    """`diagonal_scan_torch` by a `diagonal_op`."""

    def run(decay: Tensor, x: Tensor, initial_state: Tensor | None, seq_idx: Tensor | None) -> Tensor:
        inputs = (_dense(x, torch.float32), _dense(decay, torch.float64), _dense(initial_state, torch.float32))
        return op(*inputs, _dense(seq_idx, torch.int64)).to(x.dtype)

    return run


def _dense(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()
