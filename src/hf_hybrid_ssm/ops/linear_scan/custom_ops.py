"""The two scans as torch.library ops, for every backend that has kernels."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, filled
from hf_hybrid_ssm.ops.linear_scan.channel_blocks import lti_scan_torch
from hf_hybrid_ssm.ops.linear_scan.reference import DiagonalInputs, LtiInputs


def channel_outputs(inputs: LtiInputs) -> tuple[Tensor, Tensor]:
    """y (B, L, F, D) in float32 and the final state (B, F, D, N), with anything in them."""
    (batch, length, channels), (filters, _, size) = inputs.u.shape, inputs.output.shape
    return inputs.u.new_empty(batch, length, filters, channels), inputs.u.new_empty(batch, filters, channels, size)


def channel_op(name: str, forward: Callable, backward: Callable, device_types: str | None = None) -> Callable:
    """The op of a backend that computes, for a diagonal transition,

        forward: inputs → y and the final state, as `channel_outputs`;
        backward: (inputs, dy, dfinal, trains) → the gradients of u, decay, vector, output (meaningless unless the
            system `trains`), skip and the initial state.

    Both take u in float32 and the decay in float64; `seq_idx` and `lengths` are int64.
    """

    def differentiate(inputs: LtiInputs, gradients: Sequence, needed: Sequence[bool]) -> Sequence[Tensor | None]:
        return backward(inputs, *filled(gradients, lambda: channel_outputs(inputs)), any(needed[1:4]))

    options: dict[str, Any] = {"device_types": device_types, "flops": _lti_flops}
    return differentiable_op(name, LtiInputs, forward, differentiate, channel_outputs, **options)


def diagonal_op(name: str, forward: Callable, backward: Callable, device_types: str | None = None) -> Callable:
    """The op of a backend that computes

    forward: inputs → h, of x's shape (B, L, M) or (B, L, M, 2), float32;
    backward: (inputs with h in the place of x, dh) → the gradients of x, the decay (M) or (M, 2), float64, and the
        initial state.
    """
    return differentiable_op(
        name,
        DiagonalInputs,
        forward,
        lambda inputs, gradients, needed: backward(inputs, gradients[0].contiguous()),
        fake=lambda inputs: inputs.x.new_empty(inputs.x.shape),
        saved=lambda inputs, h: (inputs._replace(x=h), ()),
        device_types=device_types,
        flops=_diagonal_flops,
    )


def _lti_flops(shapes: Any) -> int:
    """Each real number of the state: decay (1, of a complex number 3), written value (2), read-out (2)."""
    return (7 if shapes.form == "complex" else 5) * shapes.u[0] * shapes.u[1] * math.prod(shapes.vector)


def _diagonal_flops(shapes: Any) -> int:
    """Each real number of the state: decay (1, of a complex number 3), input (1)."""
    return (4 if len(shapes.decay) == 2 else 2) * math.prod(shapes.x)


def lti_scan_by(op: Callable) -> Callable:
    """`lti_scan_torch` by a `channel_op`; torch takes over dense transitions.

    Outputs at some tokens only are taken of all of them. The block matrices of many filters that train would cost
    more; those of constant filters are known already, and their products are faster.
    """

    def run(inputs: LtiInputs) -> tuple[Tensor, Tensor | None]:
        u, decay, vector, *_ = inputs
        trains = torch.is_grad_enabled() and any(part.requires_grad for part in inputs[1:4])
        if inputs.form == "dense" or not (inputs.wanted.is_all or trains):
            return lti_scan_torch(inputs)
        decay = decay.expand(*vector.shape[:2], *decay.shape[-2 if inputs.form == "complex" else -1 :])
        floats = (_dense(part, torch.float32) for part in inputs[2:6])
        integers = (_dense(part, torch.int64) for part in inputs[6:8])
        y, final = op(_dense(u, torch.float32), _dense(decay, torch.float64), *floats, *integers, inputs.form, True)
        return inputs.wanted.take(y).to(u.dtype), final if inputs.returns_state else None

    return run


def diagonal_scan_by(op: Callable) -> Callable:
    """`diagonal_scan_torch` by a `diagonal_op`."""

    def run(inputs: DiagonalInputs) -> tuple[Tensor]:
        x, decay, state, seq_idx = inputs
        floats = (_dense(x, torch.float32), _dense(decay, torch.float64), _dense(state, torch.float32))
        return (op(*floats, _dense(seq_idx, torch.int64)).to(x.dtype),)

    return run


def _dense(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()
