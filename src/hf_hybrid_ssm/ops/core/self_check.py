"""Does a kernel compute, on this very device, what its reference computes?

Kernels that are right on one card, driver or compiler have been wrong on another. So each optional backend is run once
per device type and dtype on small examples before it is used, forward and backward, against the float64 reference.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hf_hybrid_ssm.ops.core.transforms import full_float32

# relative to the largest entry; a few times what rounding alone does to the examples
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def draw(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Normally distributed float32 tensors of these shapes, the same ones each time, for an op's `examples`."""
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def largest_error(
    kernel: Callable,
    reference: Callable,
    example: Callable[[], Any],
    device_type: str,
    dtype: torch.dtype,
    *,
    gradients: bool = True,
) -> float:
    """The largest relative error of `kernel` in outputs and gradients; NaN counts as infinite.

    `example()` gives what the op's implementations take: float32 CPU tensors, which are differentiated if `gradients`,
    tensors of whole numbers, and options.
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
        given = example()
        rounded = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, given)
        got = _results(kernel, given, torch.device(device_type), dtype, gradients)
        want = _results(reference, rounded, torch.device("cpu"), torch.float64, gradients)
        return max(_relative(g, w) for g, w in zip(got, want))


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _results(
    op: Callable, given: Any, device: torch.device, dtype: torch.dtype, gradients: bool
) -> list[torch.Tensor]:
    """Outputs, and with `gradients` those of all floating tensors; without, the op may overwrite what it is given."""
    leaves: list[torch.Tensor] = []

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device, copy=True)
        leaves.append(tensor.detach().to(device, dtype, copy=True).requires_grad_(gradients))
        return leaves[-1]

    with torch.set_grad_enabled(gradients):
        outputs = op(tree_map_only(torch.Tensor, placed, given))
    found = list(outputs)
    if gradients:
        weights = torch.Generator().manual_seed(1)
        loss = sum((o * torch.randn(o.shape, generator=weights).to(o.device, o.dtype)).sum() for o in outputs)
        found += torch.autograd.grad(loss, leaves)
    return [t.detach().cpu().double() for t in found]


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    return float((got - want).abs().max() / want.abs().max())
