"""The long convolution on CUDA as a product with Toeplitz matrices; its gradients are such products too.

Cut a channel's row into blocks of N tokens, x as a matrix of blocks (I, N). Then block i of the output is

    Y_i = sum_k X_{i-k} T_k,   T_k[n, o] = w[k N + o - n],

a product of matrices with many rows, since all blocks and all rows of the batch share T_k: quadratic in the length,
but in the units that do most arithmetic, and without the passes over memory of an FFT.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_hybrid_ssm.ops.core.triton_helpers import device_guard, kernel, supports
from hf_hybrid_ssm.ops.long_conv.reference import ConvInputs
from hf_hybrid_ssm.ops.long_conv.thresholds import prefers_toeplitz
from hf_hybrid_ssm.ops.long_conv.torch_backend import long_conv_torch

__all__ = ["long_conv_triton", "supports"]

TILE = {"N": 64, "M": 64, "num_warps": 4, "PRECISION": "tf32x3"}


def long_conv_triton(inputs: ConvInputs) -> tuple[Tensor]:
    """As `long_conv_torch`, which takes over what this form does not pay for: packed rows, long rows, few taps."""
    u, kernel, future_kernel, skip, history, seq_idx = inputs
    future = 0 if future_kernel is None else future_kernel.shape[-1]
    past, length = history.shape[1], u.shape[1]
    is_coarse = u.dtype == torch.bfloat16
    has_products = prefers_toeplitz(past + length, kernel.shape[-1], future, is_coarse=is_coarse)
    if seq_idx is not None or not has_products or u.dtype == torch.float64:
        return long_conv_torch(inputs)
    x = torch.cat([history.to(u.dtype), u], dim=1).transpose(1, 2).float().contiguous()
    taps = kernel if future_kernel is None else torch.cat([future_kernel.flip(-1), kernel], dim=-1)
    # output t of the row is input past + t: lags count from the history's first token
    y = toeplitz(x, taps.flatten(0, 1).contiguous().float(), -future - past, length, is_coarse)
    y = y.unflatten(1, taps.shape[:2]).permute(0, 3, 1, 2)
    return (y if skip is None else torch.addcmul(y, skip, u.unsqueeze(2).to(y.dtype)),)


@kernel
def toeplitz_kernel(
    x, taps, y, x_step, y_step, T, W, L, FIRST, input_channels, filters, num_rows, num_blocks, num_tiles,
    N: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[r, c, t] = sum_j taps[c, t - j - FIRST] x[r, c % input_channels, j] for 0 <= t < L, 0 <= j < T.

    Program c num_tiles + p: M blocks of N outputs of channel c, those of all rows at one place of the row side by
    side, so that a causal filter's tiles end with the same block. `x_step` and `y_step` are the strides of channels,
    which lie side by side. PRECISION is that of the products: "tf32x3" keeps float32, "tf32" what bfloat16 numbers
    have.
    """
    channel = tl.program_id(0) // num_tiles
    place = (tl.program_id(0) % num_tiles) * M + tl.arange(0, M)
    row, block = (place % num_rows).to(tl.int64), place // num_rows
    is_block = block < num_blocks
    n, o = tl.arange(0, N), tl.arange(0, N)
    # in 64 bits: rows, channels and tokens together pass 2^31
    source = x + (row * input_channels + channel % input_channels) * x_step
    filter_ = taps + channel.to(tl.int64) * W
    # T_k holds lags from k N - (N - 1) to k N + (N - 1); blocks before or after the input are zero
    last_block = tl.max(tl.where(is_block, block, 0), 0)
    first_block = tl.min(tl.where(is_block, block, num_blocks), 0)
    lowest = tl.maximum(-((N - 1 - FIRST) // N), first_block - (T - 1) // N)
    highest = tl.minimum((FIRST + W - 1 + N - 1) // N, last_block)
    total = tl.zeros([M, N], tl.float32)
    for k in range(lowest, highest + 1):
        j = (block - k)[:, None] * N + n[None, :]
        tile = tl.load(source[:, None] + j, mask=is_block[:, None] & (j >= 0) & (j < T), other=0.0)
        lag = k * N + o[None, :] - n[:, None] - FIRST
        matrix = tl.load(filter_ + lag, mask=(lag >= 0) & (lag < W), other=0.0)
        total = tl.dot(tile.to(tl.float32), matrix, total, input_precision=PRECISION)
    t = block[:, None] * N + o[None, :]
    target = y + (row * filters + channel) * y_step
    tl.store(target[:, None] + t, total, mask=is_block[:, None] & (t < L))


@torch.library.custom_op("hf_hybrid_ssm::long_conv_triton", mutates_args=())
def toeplitz(x: Tensor, taps: Tensor, first: int, length: int, is_coarse: bool = False) -> Tensor:
    """y (R, G, length): y[r, g, t] = sum_j taps[g, t - j - first] x[r, g % C, j], of x (R, C, T) and taps (G, W).

    `first` is the lag of the first tap; a lag is the place of the output less that of the input. `is_coarse` takes
    one tf32 product, as precise as bfloat16 inputs; else three, as float32.
    """
    x, taps = x.contiguous(), taps.contiguous()
    rows, channels, time = x.shape
    y = torch.zeros(rows, taps.shape[0], length, dtype=torch.float32, device=x.device)
    if y.numel() and x.numel() and taps.numel():
        blocks = triton.cdiv(length, TILE["N"])
        tiles = triton.cdiv(rows * blocks, TILE["M"])
        # one axis: the others end at 65,535, which training reaches with 8 rows and 8,192 filters
        with device_guard(x):
            toeplitz_kernel[(tiles * taps.shape[0],)](
                x, taps, y, time, length, time, taps.shape[1], length, first,
                channels, taps.shape[0], rows, blocks, tiles,
                **TILE | {"PRECISION": "tf32" if is_coarse else "tf32x3"},
            )  # fmt: skip
    return y


@toeplitz.register_fake
def _(x: Tensor, taps: Tensor, first: int, length: int, is_coarse: bool = False) -> Tensor:
    return torch.empty(x.shape[0], taps.shape[0], length, dtype=torch.float32, device=x.device)


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, taps, ctx.first, _, ctx.is_coarse = inputs
    ctx.save_for_backward(x, taps)


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    """From the input to the output a lag changes its sign; a tap's gradient correlates outputs with inputs."""
    x, taps = ctx.saved_tensors
    rows, channels, time = x.shape
    filters, width = taps.shape
    dx = dtaps = None
    if ctx.needs_input_grad[0]:
        dx = toeplitz(grad_y, taps.flip(-1), -(ctx.first + width - 1), time, ctx.is_coarse)
        dx = dx.unflatten(1, (filters // channels, channels)).sum(1)
    if ctx.needs_input_grad[1]:  # of each row a convolution of its own, with the row's input for a filter
        inputs = x.repeat(1, filters // channels, 1).flatten(0, 1).flip(-1)
        dtaps = toeplitz(grad_y.reshape(1, rows * filters, -1), inputs, 1 - time - ctx.first, width, ctx.is_coarse)
        dtaps = dtaps.view(rows, filters, width).sum(0)
    return dx, dtaps, None, None, None


toeplitz.register_autograd(_backward, setup_context=_save_for_backward)
