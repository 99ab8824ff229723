"""Of `parity`: a kernel's outputs and gradients against float64.

Errors are relative to the largest entry, and bounded as in the kernels' self-check.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.self_check import BOUNDS

Inputs = dict[str, torch.Tensor]

OF_ROWS = ("seq_idx", "lengths", "return_final_state")  # options that make the rows of an op


def random(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def documents(batch: int, length: int) -> torch.Tensor:
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(9)) < 3 / max(length, 6)
    return starts.int().cumsum(1)


def outputs_and_gradients(op: Callable, inputs: Inputs, options: dict, device: str, dtype: torch.dtype) -> Inputs:
    placed = {name: t.detach().to(device, dtype).requires_grad_() for name, t in inputs.items()}
    options = {name: o.to(device) if isinstance(o, torch.Tensor) else o for name, o in options.items()}
    of_rows = {name: options.pop(name) for name in OF_ROWS if name in options}
    found = op(**placed, **options, **({"rows": Rows.of(**of_rows)} if of_rows else {}))
    outputs = {f"output {i}": o for i, o in enumerate(found) if isinstance(o, torch.Tensor)}
    weights = {name: random(*o.shape, seed=90).to(o.device, o.dtype) for name, o in outputs.items()}
    loss = sum((o * weights[name]).sum() for name, o in outputs.items())
    gradients = torch.autograd.grad(loss, list(placed.values()), allow_unused=True)
    return outputs | {f"d{name}": g for name, g in zip(placed, gradients) if g is not None}


def compared(op: Callable, inputs: Inputs, options: dict, settings: Settings, dtype: torch.dtype, **how: Any) -> dict:
    """Errors by tensor. `how`: keyword arguments of the op as it is tested; the other side is float64.

    That runs as the reference, token by token, or for `by_blocks` as the vectorised torch implementation.
    """
    exact = {"backend": "torch" if how.pop("by_blocks", False) else "reference"}
    rounded = {name: t.to(dtype) for name, t in inputs.items()}
    got = outputs_and_gradients(op, rounded, options | how, settings.device, dtype)
    if settings.only_launches:
        return {}
    want = outputs_and_gradients(op, rounded, options | exact, settings.device, torch.float64)
    errors = {name: relative(got[name], want[name]) for name in want if want[name].numel()}
    return judged(errors, dtype)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want).detach().abs().max() / want.detach().abs().max().clamp(min=1e-3))


def row_options(rows: str, batch: int, length: int) -> dict:
    if rows == "packed":
        return {"seq_idx": documents(batch, length)}
    if rows == "padded":
        return {"lengths": torch.linspace(length // 2, length, batch).long()}
    return {}


def masked(op: Callable, real: torch.Tensor) -> Callable:
    """The op with outputs (B, L, ...) of padding set to zero, and its gate's gradient there with them."""

    def run(**arguments: Any) -> tuple:
        y, state = op(**arguments)
        kept = real.to(y.device).view(*real.shape, *[1] * (y.dim() - 2))
        return y.masked_fill(~kept, 0.0), state

    return run


def judged(errors: dict[str, float], dtype: torch.dtype) -> dict:
    worst = max(errors.values())
    failed = {} if worst <= BOUNDS[dtype] else {"error": f"off by more than the bound: {errors}"}
    return {"largest_error": worst, "bound": BOUNDS[dtype]} | failed
