"""One token of the short convolution on CUDA: the launch, as a torch.library op that overwrites the state."""

import torch
import triton
from torch import Tensor

from hf_hybrid_ssm.ops._core.triton_helpers import contiguous, dense_rows, device_guard, supports
from hf_hybrid_ssm.ops.causal_conv import triton_step_kernels as kernels

__all__ = ["causal_conv_step_triton", "supports"]

BLOCK = 128  # channels of a program


def causal_conv_step_triton(x, state, weight, bias=None, *, activation=None):
    """As `hf_hybrid_ssm.ops.causal_conv.causal_conv_step`; → y and the state (B, K - 1, D), which is overwritten."""
    return step(*dense_rows(x), state, *contiguous(weight, bias), activation == "silu"), state


@torch.library.custom_op("hf_hybrid_ssm::causal_conv_step_triton", mutates_args=("state",))
def step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y (B, D); weight is (D, K), the rows of x may lie apart."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, width = weight.shape
    if y.numel() == 0:
        return y
    tiles = triton.cdiv(channels, BLOCK)
    with device_guard(x):
        kernels.step_kernel[(tiles * x.shape[0],)](
            x, state, weight, bias, y, x.stride(0), channels, tiles,
            HAS_BIAS=bias is not None, SILU=silu, K=width, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return y


@step.register_fake
def _(x, state, weight, bias, silu):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
