"""Sequences cut into blocks of w tokens: a convolution within a block as a matrix, and the documents of its tokens."""

import torch
import torch.nn.functional as F


def power_of_two(least: int, start: int = 1) -> int:
    """The smallest power of two, from `start` on, that is not below `least`. By comparisons, so that `torch.compile`
    specialises on a range of lengths instead of a symbolic shape.
    """
    while start < least:
        start *= 2
    return start


def toeplitz(taps: torch.Tensor) -> torch.Tensor:
    """T (..., h, h), T[i, j] = taps[h - 1 + j - i] from input i to output j, of taps (..., 2h - 1)."""
    size = (taps.shape[-1] + 1) // 2
    return taps.unfold(-1, size, 1).flip(-2)


def causal_toeplitz(kernel: torch.Tensor) -> torch.Tensor:
    """T (..., w, w) with T[i, j] = K_{j-i} for i <= j and 0 above, from a kernel (..., w)."""
    return toeplitz(F.pad(kernel, (kernel.shape[-1] - 1, 0)))


def document_blocks(seq_idx: torch.Tensor | None, block: int) -> torch.Tensor | None:
    """(B, n, w): the document of each token of each block; the last one goes on to the end of the last block."""
    if seq_idx is None:
        return None
    batch, length = seq_idx.shape
    count = -(-length // block)
    padding = seq_idx[:, -1:].expand(batch, count * block - length)
    return torch.cat([seq_idx, padding], dim=1).view(batch, count, block)


def document_before_block(documents: torch.Tensor) -> torch.Tensor:
    """(B, n, 1): that of the token before each block; the initial state belongs to the row's first document."""
    return torch.cat([documents[:, :1, :1], documents[:, :-1, -1:]], dim=1)
