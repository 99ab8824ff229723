"""Ops of torch.library for what is more than plain torch: `torch.compile` and `torch.export` take each as one node."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from hf_hybrid_ssm.ops.core.second_derivatives import register_refusal


def differentiable_op(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[[Sequence, Sequence[Tensor], Sequence[bool]], Sequence[Tensor | None]],
    fake: Callable[..., Any],
    *,
    saved: Callable[[tuple, Any], tuple[Sequence, Sequence[Tensor]]] = lambda inputs, outputs: (inputs, ()),
    device_types: str | None = None,
    flops: Callable[..., float] | None = None,
    backward_flops: Callable[..., float] | None = None,
) -> Callable:
    """An op with a gradient, which is an op of its own (`name`_backward).

    Args:
        name: "hf_hybrid_ssm::..."
        forward: (*inputs) → a tensor or several; its annotations are the op's schema.
        backward: (inputs, gradients of the outputs, whether the gradient of each input is needed) → gradients of the
            first inputs, contiguous and each of the input's shape and dtype; what it returns for inputs that are None
            or not floating-point is ignored.
        fake: (*inputs) → empty tensors as `forward` returns them.
        saved: (inputs, outputs) → the inputs that `backward` gets, and tensors that follow them there. A tensor that
            takes the place of an input has its shape and dtype.
        device_types: on which the op runs, such as "cpu"; on all by default.
        flops: see `count_flops`.
        backward_flops: the same of the backward, given the inputs that it gets; twice `flops` by default.
    """
    schema = torch.library.infer_schema(forward, mutates_args=())
    parameters = schema[1:].partition(") -> ")[0]

    def differentiate(*arguments: Any) -> list[Tensor | None]:
        *inputs, more, gradients, needed = arguments
        pairs = zip(inputs, backward((*inputs, *more), gradients, needed))
        return [gradient for value, gradient in pairs if _is_differentiable(value)]

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        passed, more = saved(inputs, output)
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in passed), *more)
        ctx.options = [None if isinstance(value, Tensor) else value for value in passed]

    def gradient(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: checkpointing unpacks them once
        inputs = [option if value is None else value for value, option in zip(tensors, ctx.options)]
        needed = list(ctx.needs_input_grad)
        computed = iter(op_backward(*inputs, list(tensors[len(inputs) :]), list(gradients), needed))
        every = [next(computed) if _is_differentiable(value) else None for value in inputs]
        return tuple(part if need else None for part, need in zip(every, needed))

    def fake_gradient(*arguments: Any) -> list[Tensor]:
        return [value.new_empty(value.shape) for value in arguments if _is_differentiable(value)]

    op = torch.library.custom_op(name, forward, mutates_args=(), device_types=device_types, schema=schema)
    op_backward = torch.library.custom_op(
        f"{name}_backward",
        differentiate,
        mutates_args=(),
        device_types=device_types,
        schema=f"({parameters}, Tensor[] more, Tensor[] gradients, bool[] needed) -> Tensor[]",
    )
    op.register_fake(fake)
    op_backward.register_fake(fake_gradient)
    op.register_autograd(gradient, setup_context=save)
    register_refusal(op_backward, name.partition("::")[2])
    if flops is not None:
        of_backward = backward_flops or (lambda *inputs: 2 * flops(*inputs))
        count_flops(name, flops)
        count_flops(f"{name}_backward", lambda *arguments: of_backward(*arguments[:-3]))
    return op


def count_flops(name: str, formula: Callable[..., float]) -> None:
    """Let torch's `FlopCounterMode` count an op.

    Args:
        name: "hf_hybrid_ssm::..."
        formula: (*inputs) → its operations, with shapes in the place of tensors.
    """
    namespace, _, op = name.partition("::")

    def counted(*inputs: Any, out_shape: Any = None) -> float:
        return formula(*inputs)

    register_flop_formula(getattr(getattr(torch.ops, namespace), op))(counted)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def is_plain_call(tensor: Tensor) -> bool:
    """Whether a kernel may be called without torch.library in between, which takes longer than the functions of
    decoding.

    Not while something traces or watches the calls (`torch.compile`, a dispatch mode), nor for a subclass of tensors.
    The caller knows that no gradient is wanted.
    """
    return type(tensor) is Tensor and not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode()


def step_op(
    name: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    changes: tuple[str, ...],
    device_types: str | None = "cpu",
) -> Callable:
    """`compute`, which overwrites the arguments that `changes` names and has no gradient: called as it is where its
    first argument allows it (`is_plain_call`), else as an op of torch.library."""
    op = torch.library.custom_op(name, compute, mutates_args=changes, device_types=device_types)
    op.register_fake(fake)
    return lambda *arguments: (compute if is_plain_call(arguments[0]) else op)(*arguments)
