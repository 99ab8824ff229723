"""Ops of torch.library for what is more than plain torch: `torch.compile` and `torch.export` take each as one node.

torch.library takes tensors and numbers alone. What an op is given whole, as a `NamedTuple`, is its fields there:
`op(*inputs)`, and is put together again behind it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, List, get_type_hints  # noqa: UP035

import torch
from torch import Tensor
from torch._library.custom_ops import get_library_allowing_overwrite
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

_TAKEN = (Tensor, Tensor | None, bool, int, float, str, List[int])  # noqa: UP006 - all that torch 2.6 reads


def op_of_fields(
    name: str,
    inputs: Callable[..., Any],
    compute: Callable[[Any], Any],
    fake: Callable[[Any], Any],
    *,
    device_types: str | None = None,
) -> Any:
    """The op of torch.library that takes the fields of `inputs`, a NamedTuple, and computes `compute` of it.

    Args:
        name: "hf_hybrid_ssm::..."
        inputs: fields of types that torch.library does not take come last, and have defaults.
        compute: its annotation says what it returns.
        fake: gives empty tensors like that.
        device_types: on which the op runs, such as "cpu"; on all by default.
    """
    run = _of_fields(inputs, compute)
    op = torch.library.custom_op(name, run, mutates_args=(), device_types=device_types)
    op.register_fake(lambda *fields: fake(inputs(*fields)))
    return op


def _of_fields(inputs: Callable[..., Any], compute: Callable[[Any], Any]) -> Any:
    """`compute` of a NamedTuple as a function of its fields, with a signature that torch.library reads."""

    def run_fields(*fields: Any) -> Any:
        return compute(inputs(*fields))

    run: Any = run_fields
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    hints = get_type_hints(inputs).items()
    parameters = [inspect.Parameter(name, kind, annotation=hint) for name, hint in hints if hint in _TAKEN]
    returned = get_type_hints(compute).get("return")
    run.__signature__ = inspect.Signature(parameters, return_annotation=returned)
    return run


def differentiable_op(
    name: str,
    inputs: Callable[..., Any],
    forward: Callable[[Any], Any],
    backward: Callable[..., Sequence[Tensor | None]],
    fake: Callable[[Any], Any],
    *,
    saved: Callable[[Any, Any], tuple[Any, Sequence[Tensor]]] = lambda inputs, outputs: (inputs, ()),
    fake_gradient: Callable[[Tensor], Tensor] = lambda value: value.new_empty(value.shape),
    device_types: str | None = None,
    flops: Callable[[Any], float] | None = None,
    backward_flops: Callable[[Any], float] | None = None,
) -> Callable:
    """An op with a gradient, which is an op of its own (`name`_backward).

    Args:
        name: "hf_hybrid_ssm::..."
        inputs: the NamedTuple that `forward` takes; the op takes its fields.
        forward: inputs → a tensor or several; its annotation says which.
        backward: (inputs, gradients of the outputs, whether the gradient of each input is needed, *more) → gradients
            of the first inputs, of each input's shape and dtype; what it returns for inputs that are None or not
            floating-point is ignored. A gradient of an output that nothing depends on is None.
        fake: inputs → empty tensors as `forward` returns them.
        saved: (inputs, outputs) → the inputs that `backward` gets, and `more`. A tensor that takes the place of an
            input has its shape and dtype.
        fake_gradient: an empty tensor as `backward` returns it for this input; contiguous by default.
        device_types: on which the op runs, such as "cpu"; on all by default.
        flops: see `count_flops`.
        backward_flops: the same of the backward, given the inputs that it gets; twice `flops` by default.
    """

    def differentiate(*arguments: Any) -> list[Tensor | None]:
        *given, more, gradients, needed = arguments
        pairs = zip(given, backward(inputs(*given), gradients, needed, *more))
        return [gradient for value, gradient in pairs if _is_differentiable(value)]

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        passed, more = saved(make(*inputs), output)
        passed = passed[: len(inputs)]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in passed), *more)
        ctx.options = [None if isinstance(value, Tensor) else value for value in passed]

    def gradient(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: checkpointing unpacks them once
        values = [option if value is None else value for value, option in zip(tensors, ctx.options)]
        needed = list(ctx.needs_input_grad)
        computed = iter(op_backward(*values, list(tensors[len(values) :]), list(gradients), needed))
        every = [next(computed) if _is_differentiable(value) else None for value in values]
        return tuple(part if need else None for part, need in zip(every, needed))

    def refuse(ctx: Any, *_: Any) -> Any:
        raise no_second_derivative(name.partition("::")[2])

    make, op = inputs, op_of_fields(name, inputs, forward, fake, device_types=device_types)
    parameters = op._schema[1:].partition(") -> ")[0]
    schema = f"({parameters}, Tensor[] more, Tensor?[] gradients, bool[] needed) -> Tensor[]"
    options: dict[str, Any] = {"mutates_args": (), "device_types": device_types}
    op_backward = torch.library.custom_op(f"{name}_backward", differentiate, schema=schema, **options)
    op_backward.register_fake(lambda *values: [fake_gradient(value) for value in values if _is_differentiable(value)])
    op.register_autograd(gradient, setup_context=save)
    op_backward.register_autograd(refuse)  # torch's own error names neither the op nor what to do
    if flops is not None:
        of_backward = backward_flops or (lambda inputs: 2 * flops(inputs))
        count_flops(name, lambda *shapes: flops(make(*shapes)))
        count_flops(f"{name}_backward", lambda *shapes: of_backward(make(*shapes[:-3])))
    return op


def filled(gradients: Sequence[Tensor | None], empty: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Gradients of the first outputs, contiguous, zeros for those that are None; `empty` makes tensors like these."""
    if any(part is None for part in gradients):
        gradients = [like.zero_() if part is None else part for part, like in zip(gradients, empty())]
    return [part.contiguous() for part in gradients if part is not None]


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
    *,
    inputs: Callable[..., Any],
) -> Callable:
    """`compute`, which overwrites the fields that `changes` names and has no gradient: called as it is where the first
    field allows it (`is_plain_call`), else as an op of torch.library. It, `fake` and what is returned take `inputs`, a
    NamedTuple.

    The op goes from torch's dispatcher to `compute` at once: what `custom_op` puts before it, for gradients and for
    the versions of what changes, takes longer than many a step.
    """
    run = _of_fields(inputs, compute)
    namespace, _, own = name.partition("::")
    library = get_library_allowing_overwrite(namespace, own)  # a folder's own code may define the op anew
    schema = torch.library.infer_schema(run, mutates_args=changes)
    library.define(f"{own}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    key = {None: "CompositeExplicitAutograd", "cpu": "CPU", "cuda": "CUDA"}[device_types]
    library.impl(own, run, key)
    torch.library.register_fake(name, lambda *fields: fake(inputs(*fields)), lib=library)
    op = getattr(getattr(torch.ops, namespace), own).default
    return lambda given: compute(given) if is_plain_call(given[0]) else op(*given)


# -- second derivatives ----------------------------------------------------------------------------------------------


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
    """The gradients that an autograd function's backward returns, which refuse to be differentiated instead of giving
    incomplete gradients.

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
