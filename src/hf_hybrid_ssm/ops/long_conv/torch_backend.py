"""The long convolution, vectorised: one FFT over time, or halves where documents must not see each other.

Halves: a packed row is split in two again and again. What the left half of a pair sends to the right one crosses the
border between them, so it stays within the one document that spans that border: a mask on the left input and one on
the right output make packed rows exact, with fixed shapes and in O(L log^2 L).
"""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.blocks import power_of_two, toeplitz
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.output_positions import OutputPositions
from hf_hybrid_ssm.ops.core.packed_sequences import packed_sequences
from hf_hybrid_ssm.ops.long_conv.fft import fast_length, fft_conv
from hf_hybrid_ssm.ops.long_conv.reference import ConvInputs
from hf_hybrid_ssm.ops.long_conv.thresholds import DIRECT

BASE = 8  # below this size a few shifted products are cheaper than a matrix product
LARGEST_MATRIX = 64  # above this size a half is convolved by FFT instead of by its Toeplitz matrix
PADDING = 3  # times the tokens, up to which FFTs of padded documents cost less than halves


def long_conv_torch(inputs: ConvInputs) -> tuple[torch.Tensor]:
    """See `hf_hybrid_ssm.ops.long_conv.long_conv`; y (B, L, F, D) in the kernels' dtype."""
    u, kernel, future_kernel, skip, history, seq_idx = inputs
    u = u.to(kernel.dtype)
    (batch, length, channels), past = u.shape, history.shape[1]
    if length == 0 or batch == 0:
        return (u.new_zeros(batch, length, kernel.shape[0], channels),)
    x = torch.cat([history, u], dim=1) if past else u
    documents = None
    if seq_idx is not None:
        documents = torch.cat([seq_idx[:, :1].expand(batch, past), seq_idx], dim=1)
    if kernel.shape[-1] + (0 if future_kernel is None else future_kernel.shape[-1]) <= DIRECT:
        y = _direct(x.transpose(1, 2), kernel, future_kernel, documents).permute(0, 3, 1, 2)
    elif documents is None:
        y = fft_conv(x, kernel, future_kernel)
    else:
        y = _packed(x, kernel, future_kernel, documents)
    y = y[:, past:]
    return (y if skip is None else torch.addcmul(y, skip, u.unsqueeze(2)),)


def _packed(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor
) -> torch.Tensor:
    """y (B, T, F, D) of x (B, T, D): an FFT of every document as a row of its own, or halves where these are too
    unequal in length, or nobody can know."""
    if can_read_values(documents):
        packed = packed_sequences(documents, None)
        if packed.gather_index.numel() <= PADDING * documents.numel():
            return packed.pack(fft_conv(packed.unpack(x), kernel, future_kernel))
    return block_conv(x.transpose(1, 2), kernel, future_kernel, documents).permute(0, 3, 1, 2)


def sampled(inputs: ConvInputs, at: OutputPositions) -> torch.Tensor:
    """y (B, J, F, D) at these tokens: a few outputs cost less than all."""
    u, kernel, _, skip, history, seq_idx = inputs
    (batch, length, channels), taps = u.shape, kernel.shape[-1]
    wanted = at.positions
    if wanted is None:
        wanted = at.take(torch.arange(length, device=u.device).unsqueeze(0)).expand(batch, -1)
    missing = taps - 1 - history.shape[1]
    x = F.pad(torch.cat([history, u], dim=1), (0, 0, max(missing, 0), 0))[:, max(-missing, 0) :]
    row = torch.arange(batch, device=u.device).unsqueeze(1)
    windows = x.unfold(1, taps, 1)[row, wanted]  # (B, J, D, K), the last tap is the token itself
    if seq_idx is not None:
        documents = torch.cat([seq_idx[:, :1].expand(batch, taps - 1), seq_idx], dim=1)
        spans = documents.unfold(1, taps, 1)[row, wanted]
        windows = torch.where((spans == spans[..., -1:]).unsqueeze(2), windows, 0.0)
    outputs = wanted.shape[1]  # a number that a graph may not know, and zero may be: no size is left to be inferred
    flat = windows.permute(2, 0, 1, 3).reshape(channels, batch * outputs, taps)
    y = torch.bmm(flat, kernel.flip(-1).permute(1, 2, 0)).view(channels, batch, outputs, kernel.shape[0])
    y = y.permute(1, 2, 3, 0)
    return y if skip is None else y + skip * at.take(u).unsqueeze(2)


def _direct(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor | None
) -> torch.Tensor:
    """Tap by tap, for short kernels. x (B, D, T) -> (B, F, D, T)."""
    time = x.shape[-1]
    x = x.unsqueeze(1)
    y = kernel[..., :1] * x
    for taps, is_past in ((kernel[..., 1:], True), (future_kernel, False)):
        for lag in range(1, 1 if taps is None else min(taps.shape[-1] + 1, time)):
            assert taps is not None
            source = x[..., : time - lag] if is_past else x[..., lag:]
            if documents is not None:
                same = (documents[:, lag:] == documents[:, : time - lag])[:, None, None]
                source = torch.where(same, source, 0.0)
            y = y + F.pad(taps[..., lag - 1 : lag] * source, (lag, 0) if is_past else (0, lag))
    return y


def block_conv(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor
) -> torch.Tensor:
    """Outputs (M, F, D, T) of x (M, D, T) by halves; documents (M, T), no token sees another document."""
    batch, _, time = x.shape
    size = power_of_two(time, BASE)
    x = F.pad(x, (0, size - time)).transpose(0, 1)  # (D, M, size)
    documents = torch.cat([documents, documents[:, -1:].expand(batch, size - time)], dim=1)
    y = _base(x, kernel, future_kernel, documents)
    half = BASE
    while half < size:
        y = y + _level(x, kernel, future_kernel, documents, half)
        half *= 2
    return y[..., :time].permute(2, 0, 1, 3)


def _base(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor
) -> torch.Tensor:
    """What tokens of one aligned group of BASE send each other. x (D, M, T) -> (F, D, M, T)."""
    channels, batch, size = x.shape
    groups = x.reshape(channels, batch * (size // BASE), BASE).permute(1, 0, 2)
    future_kernel = None if future_kernel is None else future_kernel[..., : BASE - 1]
    y = _direct(groups, kernel[..., :BASE], future_kernel, documents.reshape(-1, BASE))
    return y.permute(1, 2, 0, 3).reshape(-1, channels, batch, size)


def _level(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor, half: int
) -> torch.Tensor:
    """What the halves of every aligned pair of `half` tokens send each other. x (D, M, T) -> (F, D, M, T)."""
    pairs = (x.shape[-1] // (2 * half), 2, half)
    left, right = x.unflatten(-1, pairs).unbind(3)
    left_documents, right_documents = documents.unflatten(-1, pairs).unbind(2)
    spanning = left_documents[..., -1:]  # the one document that can reach over the border
    left_alive, right_alive = left_documents == spanning, right_documents == spanning
    to_right = _cross(left, left_alive, kernel[..., 1:], right_alive)
    if future_kernel is None:
        to_left = torch.zeros_like(to_right)
    else:
        to_left = _cross(right.flip(-1), right_alive.flip(-1), future_kernel, left_alive.flip(-1)).flip(-1)
    return torch.stack([to_left, to_right], dim=-2).flatten(3)


def _cross(
    source: torch.Tensor, source_alive: torch.Tensor, taps: torch.Tensor, target_alive: torch.Tensor
) -> torch.Tensor:
    """out_j = sum_i taps[h - 1 + j - i] source_i: the step over one border. source (D, M, P, h) -> (F, D, M, P, h)."""
    channels, batch, pairs, half = source.shape
    near = min(half, taps.shape[-1])  # a short kernel touches only the tokens next to the border
    if near == 0:
        return source.new_zeros(taps.shape[0], channels, batch, pairs, half)
    source = torch.where(source_alive, source, 0.0)[..., half - near :].reshape(channels, batch * pairs, near)
    taps = F.pad(taps[..., : 2 * near - 1], (0, max(0, 2 * near - 1 - taps.shape[-1])))
    if near <= LARGEST_MATRIX:
        matrix = toeplitz(taps).permute(1, 2, 0, 3).reshape(channels, near, -1)  # (D, h, F h)
        out = torch.bmm(source, matrix).view(channels, batch, pairs, -1, near).permute(3, 0, 1, 2, 4)
    else:
        size = fast_length(2 * near - 1)
        product = torch.fft.rfft(source, n=size) * torch.fft.rfft(taps, n=size).unsqueeze(-2)
        out = torch.fft.irfft(product, n=size)[..., near - 1 : 2 * near - 1]
        out = out.reshape(-1, channels, batch, pairs, near)
    return torch.where(target_alive, F.pad(out, (0, half - near)), 0.0)
