"""Ops with first derivatives only raise on a double backward instead of returning incomplete gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def no_second_derivative(name: str) -> RuntimeError:
    """The error, as torch's own for kernels without a second derivative is a RuntimeError."""
    return RuntimeError(
        f"{name} has no second derivative (a gradient was taken with create_graph=True, and then differentiated): "
        "compute the forward with HF_HYBRID_SSM_BACKEND=reference, or inside of `with backend('reference'):` "
        "(hf_hybrid_ssm.ops.core.dispatch), whose operations have all derivatives."
    )


def refuse_second_derivative(
    name: str, gradients: Sequence[Tensor | None], output: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients that an autograd function's backward returns, which refuse to be differentiated.

    `once_differentiable` of torch refuses only where the gradient of the output has a graph: the gradient of a loss
    itself passes as a constant.

    Args:
        name: of the op.
        gradients: of its inputs, None where none is wanted.
        output: one that it saved (`ctx.save_for_backward`), by which they hang on the inputs.

    Returns:
        The gradients, unchanged if nobody asked for a graph of them.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients)
    present = iter(_Refusal.apply(name, output, *(part for part in gradients if part is not None)))
    return tuple(None if part is None else next(present) for part in gradients)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, output: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise no_second_derivative(ctx.name)


def register_refusal(op_backward: Any, name: str) -> None:
    """Give the op that computes the gradients of op `name` a derivative that raises; torch's own error names neither
    the op that was called nor what to do."""

    def refuse(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative(name)

    op_backward.register_autograd(refuse)
