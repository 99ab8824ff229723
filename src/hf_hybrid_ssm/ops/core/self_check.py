"""Does a kernel compute, on this very device, what its reference computes?

Kernels that are right on one card, driver or compiler have been wrong on another. So each optional backend is run once
per device type and dtype on a small example before it is used, forward and backward, against the float64 reference.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_hybrid_ssm.ops.core.precision import full_float32

# relative to the largest entry; a few times what rounding alone does to the examples
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Normally distributed float32 tensors of these shapes, the same ones each time: an op's `self_check_inputs`."""
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def largest_error(
    kernel: Callable,
    reference: Callable,
    inputs: Callable[[], dict],
    device_type: str,
    dtype: torch.dtype,
    *,
    gradients: bool = True,
) -> float:
    """The largest relative error of `kernel` in outputs and gradients; NaN counts as infinite.

    `inputs()` gives keyword arguments of the op: float32 CPU tensors, which are differentiated if `gradients`, tensors
    of whole numbers, and options.
    """
    # the first use may lie inside a trace, no_grad, autocast, a default device, or a checkpoint, which counts tensors;
    # and the user may have asked for products in TF32, of which some kernels have torch do theirs
    surroundings = (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(_identity, _identity),
        torch.autocast(device_type, enabled=False),
        torch.device("cpu"),
        full_float32(),
    )
    with ExitStack() as stack:
        for context in surroundings:
            stack.enter_context(context)
        arguments = inputs()
        run = _outputs_and_gradients if gradients else _outputs
        got = run(kernel, arguments, torch.device(device_type), dtype)
        rounded = {name: t.to(dtype) if _is_real(t) else t for name, t in arguments.items()}
        want = run(reference, rounded, torch.device("cpu"), torch.float64)
        return max(_relative(g, w) for g, w in zip(got, want))


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outputs(op: Callable, arguments: dict, device: torch.device, dtype: torch.dtype) -> list:
    """Of an op that may overwrite its arguments."""
    tensors = {name: t.to(device, copy=True) for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    tensors = {name: t.to(dtype) if _is_real(t) else t for name, t in tensors.items()}
    with torch.no_grad():
        return [t.cpu().double() for t in op(**(arguments | tensors))]


def _outputs_and_gradients(op: Callable, arguments: dict, device: torch.device, dtype: torch.dtype) -> list:
    tensors = {
        name: t.detach().to(device, dtype).requires_grad_()
        for name, t in arguments.items()
        if isinstance(t, torch.Tensor)
    }
    outputs = op(**(arguments | tensors))
    weights = torch.Generator().manual_seed(1)
    loss = sum((o * torch.randn(o.shape, generator=weights).to(o.device, o.dtype)).sum() for o in outputs)
    return [t.detach().cpu().double() for t in (*outputs, *torch.autograd.grad(loss, list(tensors.values())))]


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    return float((got - want).abs().max() / want.abs().max())
