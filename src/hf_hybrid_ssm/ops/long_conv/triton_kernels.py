"""Triton kernel of the long convolution: each channel's Toeplitz matrix, tile by tile on the matrix units.

Cut a channel's row into blocks of N tokens, x as a matrix of blocks (I, N). Then block i of the output is

    Y_i = sum_k X_{i-k} T_k,   T_k[n, o] = w[k N + o - n],

a product of matrices with many rows, since all blocks and all rows of the batch share T_k: quadratic in the length,
but in the units that do most arithmetic, and without the passes over memory of an FFT.
"""

import triton
import triton.language as tl


@triton.jit
def toeplitz_kernel(
    x, taps, y, x_row, x_step, y_row, y_step, T, W, L, FIRST, input_channels, num_rows, num_blocks,
    num_tiles, N: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[r, c, t] = sum_j taps[c, t - j - FIRST] x[r, c % input_channels, j] for 0 <= t < L, 0 <= j < T.

    Program c num_tiles + p: M blocks of N outputs of channel c, those of all rows at one place of the row side by
    side, so that a causal filter's tiles end with the same block. `x_row` and `x_step` are the strides of row and
    channel. PRECISION is that of the products: "tf32x3" keeps float32, "tf32" keeps what bfloat16 numbers have.
    """
    channel = tl.program_id(0) // num_tiles
    place = (tl.program_id(0) % num_tiles) * M + tl.arange(0, M)
    row, block = (place % num_rows).to(tl.int64), place // num_rows
    is_block = block < num_blocks
    n, o = tl.arange(0, N), tl.arange(0, N)
    source = x + row * x_row + (channel % input_channels) * x_step
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
    target = y + row * y_row + channel.to(tl.int64) * y_step
    tl.store(target[:, None] + t, total, mask=is_block[:, None] & (t < L))
