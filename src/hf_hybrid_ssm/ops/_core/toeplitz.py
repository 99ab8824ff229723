"""A convolution within a block as a product with a matrix."""

import torch
import torch.nn.functional as F


def toeplitz(taps: torch.Tensor) -> torch.Tensor:
    """T (..., h, h), T[i, j] = taps[h - 1 + j - i] from input i to output j, of taps (..., 2h - 1)."""
    size = (taps.shape[-1] + 1) // 2
    return taps.unfold(-1, size, 1).flip(-2)


def causal_toeplitz(kernel: torch.Tensor) -> torch.Tensor:
    """T (..., w, w) with T[i, j] = K_{j-i} for i <= j and 0 above, from a kernel (..., w)."""
    return toeplitz(F.pad(kernel, (kernel.shape[-1] - 1, 0)))
