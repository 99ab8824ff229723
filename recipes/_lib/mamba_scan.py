"""Mamba's selective scan in C (`mamba_scan.c`), with its gradients: for the peer of `peers.py`."""

from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.native_library import CFunction, library_beside

_library = library_beside(__file__)
_INPUTS = "u[B L D], delta[B L D], rates[N D], b[B L N], c[B L N]"
_FORWARD = CFunction(_library, "mamba_scan_forward", f"{_INPUTS}, y[B L D]", "B, L, D, N")
_BACKWARD = CFunction(
    _library,
    "mamba_scan_backward",
    f"{_INPUTS}, dy[B L D], du[B L D], ddelta[B L D], da[B N D], db[B L N], dc[B L N]",
    "B, L, D, N",
)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        u, delta, rates, b, c = (part.float().contiguous() for part in (u, delta, a.t(), b, c))
        y = torch.empty_like(u)
        _FORWARD((u, delta, rates, b, c, y))
        ctx.save_for_backward(u, delta, rates, b, c)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        u, _, rates, b, c = given = ctx.saved_tensors
        du, ddelta, db, dc = torch.empty_like(u), torch.empty_like(u), torch.zeros_like(b), torch.zeros_like(c)
        da = u.new_empty(len(u), *rates.shape)
        _BACKWARD((*given, gradients[0].float().contiguous(), du, ddelta, da, db, dc))
        return du, ddelta, da.sum(0).t(), db, dc


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """y_t = C_t h_t with h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t, from h_0 = 0; float32.

    Args:
        u, delta: (B, L, D).
        a: (D, N).
        b, c: (B, L, N).
    """
    return _SelectiveScan.apply(u, delta, a, b, c)
