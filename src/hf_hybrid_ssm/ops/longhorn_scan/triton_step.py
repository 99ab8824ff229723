"""One token of the Longhorn scan on CUDA: the launch, which overwrites the state."""

import functools

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import step_op
from hf_hybrid_ssm.ops.core.triton_helpers import contiguous, dense_rows, device_guard, supports
from hf_hybrid_ssm.ops.longhorn_scan import triton_step_kernels as kernels
from hf_hybrid_ssm.ops.longhorn_scan.heads import step_over_heads

__all__ = ["longhorn_step_triton", "supports"]

TILE_NUMBERS = 512  # of a program's states: sixteen of each lane


@step_over_heads
def longhorn_step_triton(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    state: Tensor,
    *,
    beta_bias: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token x (B, 1, D) after `state`, which is overwritten: (B, D, N), or (P, D, N) with pages (B,)."""
    return step(*dense_rows(x, beta_logit, k, q, z), *contiguous(beta_bias, D), state, *contiguous(pages)), state


@functools.cache
def tile_sizes(num_states: int) -> dict[str, int]:
    states = max(2, triton.next_power_of_2(num_states))
    return {"BN": states, "BD": max(1, TILE_NUMBERS // states), "num_warps": 1}


def _step(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor | None,
    beta_bias: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
    pages: Tensor | None,
) -> Tensor:
    """y (B, 1, D); the rows of the first five may lie apart, and so may the pages of state (P, D, N)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (batch, _, channels), num_states, sizes = x.shape, state.shape[2], tile_sizes(state.shape[2])
    if y.numel() == 0:
        return y
    tiles = -(-channels // sizes["BD"])  # `triton.cdiv` is a function of kernels: five calls of Python
    rows = (0 if t is None else t.stride(0) for t in (x, beta_logit, k, q, z, state))
    with device_guard(x):
        kernels.step_kernel[(tiles * batch,)](
            x, beta_logit, k, q, z, beta_bias, skip, state, pages, y, *rows, channels, num_states, tiles,
            HAS_BIAS=beta_bias is not None, HAS_SKIP=skip is not None, HAS_GATE=z is not None,
            HAS_PAGES=pages is not None, **sizes,
        )  # fmt: skip
    return y


def _empty(
    x: Tensor,
    beta_logit: Tensor,
    k: Tensor,
    q: Tensor,
    z: Tensor | None,
    beta_bias: Tensor | None,
    skip: Tensor | None,
    state: Tensor,
    pages: Tensor | None,
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


step = step_op("hf_hybrid_ssm::longhorn_step_triton", _step, _empty, ("state",), device_types=None)
