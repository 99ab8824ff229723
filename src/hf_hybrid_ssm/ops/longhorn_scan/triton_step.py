"""One token of the Longhorn scan on CUDA: the launch, which overwrites the state."""

import functools

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import step_op
from hf_hybrid_ssm.ops.core.triton_helpers import contiguous, dense_rows, supports
from hf_hybrid_ssm.ops.core.triton_launch import Launcher
from hf_hybrid_ssm.ops.longhorn_scan import triton_step_kernels as kernels
from hf_hybrid_ssm.ops.longhorn_scan.heads import over_heads
from hf_hybrid_ssm.ops.longhorn_scan.reference import ScanInputs

__all__ = ["longhorn_step_triton", "supports"]

TILE_NUMBERS = 512  # of a program's states: sixteen of each lane
launch_step = Launcher(kernels.step_kernel)


@over_heads
def longhorn_step_triton(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, D, N), or (P, D, N) with pages (B,)."""
    beta_bias, D, pages = contiguous(inputs.beta_bias, inputs.D, inputs.pages)
    state = inputs.state
    assert state is not None
    x, beta_logit, k, q, z = dense_rows(*inputs[:5])
    return step(ScanInputs(x, beta_logit, k, q, z, beta_bias, D, state, pages=pages)), state


@functools.cache
def constants_of(num_states: int, has_bias: bool, has_skip: bool, has_gate: bool, has_pages: bool) -> dict[str, int]:
    flags = {"HAS_BIAS": has_bias, "HAS_SKIP": has_skip, "HAS_GATE": has_gate, "HAS_PAGES": has_pages}
    return flags | tile_sizes(num_states)


def tile_sizes(num_states: int) -> dict[str, int]:
    states = max(2, triton.next_power_of_2(num_states))
    return {"BN": states, "BD": max(1, TILE_NUMBERS // states), "num_warps": 1}


def _empty(inputs: ScanInputs) -> Tensor:
    return torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)


def _step(inputs: ScanInputs) -> Tensor:
    """y (B, 1, D); the rows of the first five may lie apart, and so may the pages of state (P, D, N)."""
    x, beta_logit, k, q, z, beta_bias, skip, state, *_ = inputs
    y, pages = _empty(inputs), inputs.pages
    if y.numel() == 0:
        return y
    assert state is not None
    (batch, _, channels), num_states = x.shape, state.shape[2]
    tensors = (x, beta_logit, k, q, z, beta_bias, skip, state, pages, y)
    rows = (x.stride(0), beta_logit.stride(0), k.stride(0), q.stride(0), 0 if z is None else z.stride(0))
    constants = constants_of(num_states, beta_bias is not None, skip is not None, z is not None, pages is not None)
    tiles = -(-channels // constants["BD"])  # `triton.cdiv` is a function of kernels: five calls of Python
    launch_step(tiles * batch, tensors, (*rows, state.stride(0), channels, num_states, tiles), constants)
    return y


step = step_op("hf_hybrid_ssm::longhorn_step_triton", _step, _empty, ("state",), device_types=None, inputs=ScanInputs)
