# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 50257c330e7159d0a887040beae2ca6930b9c662c3ff6d0980f39ee4c04337a8

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .dispatch import (
    Op, can_read_values, check_lengths, check_output_positions, check_seq_idx, check_tensor, draw, is_transforming,
    last_inputs, packed_sequences, power_of_two, take_outputs, toeplitz, without_autocast, zero_beyond,
)


# ---- ops/long_conv/choice.py ----------------------------------------------------------------------------------------
# Which form of the long convolution costs least on a card, by counting what each computes and moves.
#
# Counts are for one output token of one channel; passes over memory are those of kernels that each read their inputs
# and write their result once, in float32. `benchmarks/long_conv_counts.py` prints them by length.
#
#     direct     tap by tap: one pass a tap
#     toeplitz   products with tiles of the Toeplitz matrix on the matrix units: quadratic, one pass
#     fft        a real FFT of twice the length, its product with the filter's, and back
#     monarch    the same transform as products with two small Fourier matrices, each a matrix product of torch

DIRECT = 16  # taps, up to which the sum tap by tap is a few fused operations
TILE = 64  # tokens of a Toeplitz tile
FLOAT = 4  # bytes


class Card(NamedTuple):
    """What a data-centre card does in a second, as its maker says; the same ratios hold within 2 from A100 to H200."""

    tf32: float = 495e12  # flops of products on the matrix units
    float32: float = 67e12  # flops elsewhere
    bytes: float = 4.8e12
    share: float = 0.5  # of the matrix units' rate that products of 64 x 64 reach


CARD = Card()


class Cost(NamedTuple):
    """Of one token and channel."""

    matrix_flops: float
    flops: float
    bytes: float

    def seconds(self, card: Card = CARD) -> float:
        """Arithmetic and memory overlap: the slower one counts."""
        computing = self.matrix_flops / (card.tf32 * card.share) + self.flops / card.float32
        return max(computing, self.bytes / card.bytes)


def toeplitz_cost(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> Cost:
    """Tiles that the taps of the past and of the future reach, on average over the row's blocks; with the transposes
    to and from channels first. float32 takes three tf32 products, bfloat16 inputs take one."""
    blocks = math.ceil(length / TILE)
    back, ahead = min(math.ceil((taps - 1) / TILE) + 1, blocks), min(math.ceil(future / TILE), blocks - 1)
    tiles = back * (2 * blocks - back + 1) / 2 + ahead * (2 * blocks - ahead - 1) / 2
    return Cost((1 if is_coarse else 3) * 2 * TILE * tiles / blocks, 0.0, 6 * FLOAT)


def fft_cost(length: int, taps: int) -> Cost:
    """Real transforms of `length` + `taps` points there and back; the filter's own is shared by the rows of a batch.

    Transposes there and back (4 passes over the tokens), padding, transforms, and the product of the spectra. Above
    2^14 points a transform goes through memory twice.
    """
    size = length + min(taps, length)
    points = size / length
    passes = 2 if size > 1 << 14 else 1
    return Cost(0.0, 2 * 2.5 * points * math.log2(size), FLOAT * (4 + points * (1 + 4 * passes + 3)))


def monarch_cost(length: int, taps: int) -> Cost:
    """Two stages there and two back, each a product of real matrices that hold real and imaginary parts, written to
    memory and read again as twiddle factors and the next stage need it."""
    size = length + min(taps, length)
    points, root = size / length, math.sqrt(size)
    products = 2 * points * (4 * root + 8 * root)
    stages = 2 * (1 + 2) + 4 * (2 + 2)  # real to complex there and back; twiddles and the second stage, complex
    return Cost(3 * products, 0.0, FLOAT * (4 + points * (2 + stages + 3 * 2)))


def choose(length: int, taps: int, future: int = 0, *, is_coarse: bool = False) -> str:
    """The form of least cost: "direct", "toeplitz" or "fft". "monarch" is only counted: unless one kernel did all of
    its stages, it moves more than "fft" at any length."""
    if taps + future <= DIRECT:
        return "direct"
    toeplitz = toeplitz_cost(length, taps, future, is_coarse=is_coarse).seconds()
    return "toeplitz" if toeplitz <= fft_cost(length, max(taps, future)).seconds() else "fft"


# ---- ops/long_conv/fft.py -------------------------------------------------------------------------------------------
# The long convolution by one real FFT over time, with its own backward.
#
# Autograd would take the backward of a real FFT through a complex one of the full size, twice as long. And the spectra
# of all channels together are many times a processor's cache, so that the time would go into fetching memory: on CPU a
# few channels at a time go all the way through.

CACHED = 1 << 19  # numbers of one group of channels, of the order of a second-level cache


def fft_conv(u: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None) -> torch.Tensor:
    """y (B, T, F, D) of u (B, T, D) with kernels (F, D, K) of the lags 0, 1, ... and (F, D, K') of -1, -2, ..."""
    time = u.shape[1]
    kernel = kernel[..., :time]
    if future_kernel is None or time == 1:
        future_kernel = kernel.new_zeros(*kernel.shape[:-1], 0)
    future_kernel = future_kernel[..., : time - 1]
    if is_transforming():
        size = _size(time, kernel.shape[-1], future_kernel.shape[-1])
        return channels_last(_circular(channels_first(u), kernel, future_kernel, size))
    return _FFTConv.apply(u, kernel, future_kernel)


def fast_length(minimum: int) -> int:
    """The smallest 2^a 3^b 5^c that is not below `minimum`: sizes every FFT library is fast at."""
    best = 1 << max(minimum - 1, 0).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            quotient = -(-minimum // three)
            best = min(best, three << max(quotient - 1, 0).bit_length())
            three *= 3
        five *= 5
    return best


def _size(time: int, taps: int, ahead: int) -> int:
    """Points of the circle: what wraps around must land outside of the T outputs."""
    return fast_length(time + max(taps - 1, ahead))


def channels_first(u: torch.Tensor) -> torch.Tensor:
    """(B, T, ...) -> (..., B, T), copied as one flat matrix: several times faster than the copy of a permuted view."""
    batch, time, *rest = u.shape
    return u.reshape(batch * time, -1).t().contiguous().view(*rest, batch, time)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """(..., B, T) -> (B, T, ...), the inverse of `channels_first`."""
    *rest, batch, time = x.shape
    return x.reshape(-1, batch * time).t().contiguous().view(batch, time, *rest)


def _groups(x: torch.Tensor, size: int, filters: int) -> Iterator[slice]:
    channels = step = x.shape[0]
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        step = max(8, CACHED // max(1, x.shape[1] * filters * size))
    return (slice(begin, min(begin + step, channels)) for begin in range(0, channels, step))


def _spectrum(kernel: torch.Tensor, future: torch.Tensor, size: int) -> torch.Tensor:
    """Of the circular filter (F, d, 1, size): the past's taps at its start, the future's at its end, nearest last."""
    if future.shape[-1]:
        gap = kernel.new_zeros(*kernel.shape[:-1], size - kernel.shape[-1] - future.shape[-1])
        kernel = torch.cat([kernel, gap, future.flip(-1)], dim=-1)
    return torch.fft.rfft(kernel, n=size).unsqueeze(-2)


def _circular(x: torch.Tensor, kernel: torch.Tensor, future: torch.Tensor, size: int) -> torch.Tensor:
    """(F, d, B, T) of x (d, B, T), by a circle of `size` points."""
    product = torch.fft.rfft(x, n=size) * _spectrum(kernel, future, size)
    return torch.fft.irfft(product, n=size)[..., : x.shape[-1]]


class _FFTConv(torch.autograd.Function):
    @staticmethod
    def forward(u: torch.Tensor, kernel: torch.Tensor, future: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = channels_first(u)  # (D, B, T)
        channels, batch, time = x.shape
        size = _size(time, kernel.shape[-1], future.shape[-1])
        y = x.new_empty(kernel.shape[0], channels, batch, time)
        for group in _groups(x, size, kernel.shape[0]):
            y[:, group] = _circular(x[group], kernel[:, group], future[:, group], size)
        return channels_last(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        u, kernel, future = ctx.saved_tensors
        time, taps, ahead = u.shape[1], kernel.shape[-1], future.shape[-1]
        size = _size(time, taps, ahead)
        kernels_train = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        of_y = channels_first(grad)  # (F, D, B, T)
        x = channels_first(u) if kernels_train else None
        of_x = torch.empty_like(of_y[0]) if ctx.needs_input_grad[0] else None
        of_kernel, of_future = (torch.empty_like(k) if kernels_train else None for k in (kernel, future))
        for group in _groups(of_y[0], size, kernel.shape[0]):
            spectrum = torch.fft.rfft(of_y[:, group], n=size)  # (F, d, B, size)
            if of_x is not None:
                product = spectrum * _spectrum(kernel[:, group], future[:, group], size).conj()
                of_x[group] = torch.fft.irfft(product.sum(0), n=size)[..., :time]
            if x is not None and of_kernel is not None and of_future is not None:
                product = spectrum * torch.fft.rfft(x[group], n=size).conj()
                lags = torch.fft.irfft(product.sum(2), n=size)  # (F, d, size)
                of_kernel[:, group] = lags[..., :taps]
                of_future[:, group] = lags[..., size - ahead :].flip(-1)
        return None if of_x is None else channels_last(of_x), of_kernel, of_future


# ---- ops/long_conv/reference.py -------------------------------------------------------------------------------------
# The long convolution, term by term: the equation itself, quadratic in the length.

def long_conv_reference(u, kernel, future_kernel, skip, history, seq_idx):
    """y_t = sum_{k>=0} K_k u_{t-k} + sum_{k>=1} F_{k-1} u_{t+k} + D u_t, over the tokens of t's document.

    Shapes as in `long_conv_torch`. One row and one pair of positions at a time.
    """
    u = u.to(kernel.dtype)
    batch, length, _ = u.shape
    past = history.shape[1]
    rows = []
    for b in range(batch):
        tokens = torch.cat([history[b], u[b]])
        documents = [0] * (past + length)
        if seq_idx is not None:
            documents = [int(seq_idx[b, 0])] * past + seq_idx[b].tolist() if length else documents
        outputs = []
        for t in range(past, past + length):
            y = u.new_zeros(kernel.shape[0], u.shape[2])
            for j in range(past + length):
                lag = t - j
                if documents[j] != documents[t]:
                    continue
                if 0 <= lag < kernel.shape[-1]:
                    y = y + kernel[..., lag] * tokens[j]
                elif lag < 0 and future_kernel is not None and -lag - 1 < future_kernel.shape[-1]:
                    y = y + future_kernel[..., -lag - 1] * tokens[j]
            if skip is not None:
                y = y + skip * tokens[t]
            outputs.append(y)
        rows.append(torch.stack(outputs) if outputs else u.new_zeros(0, kernel.shape[0], u.shape[2]))
    return torch.stack(rows) if rows else u.new_zeros(0, length, kernel.shape[0], u.shape[2])


def self_check_inputs() -> dict:
    """Longer than a tile, two filters, both directions."""
    shapes = {"u": (2, 90, 3), "kernel": (2, 3, 70), "future_kernel": (2, 3, 20), "skip": (2, 3), "history": (2, 5, 3)}
    return draw(shapes) | {"seq_idx": None}


# ---- ops/long_conv/torch_backend.py ---------------------------------------------------------------------------------
# The long convolution, vectorised: one FFT over time, or halves where documents must not see each other.
#
# Halves: a packed row is split in two again and again. What the left half of a pair sends to the right one crosses the
# border between them, so it stays within the one document that spans that border: a mask on the left input and one on
# the right output make packed rows exact, with fixed shapes and in O(L log^2 L).

BASE = 8  # below this size a few shifted products are cheaper than a matrix product
LARGEST_MATRIX = 64  # above this size a half is convolved by FFT instead of by its Toeplitz matrix
PADDING = 3  # times the tokens, up to which FFTs of padded documents cost less than halves


def long_conv_torch(u, kernel, future_kernel, skip, history, seq_idx):
    """y (B, L, F, D) of u (B, L, D) with kernels (F, D, K), skip (F, D), history (B, H, D), seq_idx (B, L).

    Computed in the kernels' dtype, which skip and history have too.
    """
    u = u.to(kernel.dtype)
    (batch, length, channels), past = u.shape, history.shape[1]
    if length == 0 or batch == 0:
        return u.new_zeros(batch, length, kernel.shape[0], channels)
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
    return y if skip is None else torch.addcmul(y, skip, u.unsqueeze(2))


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


def sampled(
    u: torch.Tensor,
    kernel: torch.Tensor,
    skip: torch.Tensor | None,
    history: torch.Tensor,
    seq_idx: torch.Tensor | None,
    stride: int | None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (B, J, F, D) at every `stride`-th token or at `positions`: a few outputs cost less than all."""
    batch, length, channels = u.shape
    taps = kernel.shape[-1]
    strided = torch.arange(length, device=u.device)[(stride or 1) - 1 :: stride]
    wanted = strided.expand(batch, -1) if positions is None else positions
    if wanted.numel() == 0:
        return u.new_zeros(*wanted.shape, kernel.shape[0], channels)
    missing = taps - 1 - history.shape[1]
    x = F.pad(torch.cat([history, u], dim=1), (0, 0, max(missing, 0), 0))[:, max(-missing, 0) :]
    rows = torch.arange(batch, device=u.device).unsqueeze(1)
    windows = x.unfold(1, taps, 1)[rows, wanted]  # (B, J, D, K), the last tap is the token itself
    if seq_idx is not None:
        documents = torch.cat([seq_idx[:, :1].expand(batch, taps - 1), seq_idx], dim=1)
        spans = documents.unfold(1, taps, 1)[rows, wanted]
        windows = torch.where((spans == spans[..., -1:]).unsqueeze(2), windows, 0.0)
    flat = windows.permute(2, 0, 1, 3).reshape(channels, -1, taps)
    y = torch.bmm(flat, kernel.flip(-1).permute(1, 2, 0)).view(channels, batch, -1, kernel.shape[0])
    y = y.permute(1, 2, 3, 0)
    return y if skip is None else y + skip * take_outputs(u, stride, positions).unsqueeze(2)


def _direct(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor | None
) -> torch.Tensor:
    """Tap by tap, for short kernels. x (B, D, T) -> (B, F, D, T)."""
    time = x.shape[-1]
    x = x.unsqueeze(1)
    y = kernel[..., :1] * x
    ahead = 0 if future_kernel is None else future_kernel.shape[-1]
    for taps, count, is_past in ((kernel[..., 1:], kernel.shape[-1] - 1, True), (future_kernel, ahead, False)):
        for lag in range(1, min(count + 1, time)):
            source = x[..., : time - lag] if is_past else x[..., lag:]
            if documents is not None:
                same = (documents[:, lag:] == documents[:, : time - lag])[:, None, None]
                source = torch.where(same, source, 0.0)
            y = y + F.pad(taps[..., lag - 1 : lag] * source, (lag, 0) if is_past else (0, lag))  # type: ignore[index]
    return y


def block_conv(
    x: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None, documents: torch.Tensor
) -> torch.Tensor:
    """Outputs (M, F, D, T) of x (M, D, T) by halves; documents (M, T), no token sees another document."""
    rows, _, time = x.shape
    size = power_of_two(time, BASE)
    x = F.pad(x, (0, size - time)).transpose(0, 1)  # (D, M, size)
    documents = torch.cat([documents, documents[:, -1:].expand(rows, size - time)], dim=1)
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
    channels, rows, size = x.shape
    groups = x.reshape(channels, rows * (size // BASE), BASE).permute(1, 0, 2)
    future_kernel = None if future_kernel is None else future_kernel[..., : BASE - 1]
    y = _direct(groups, kernel[..., :BASE], future_kernel, documents.reshape(-1, BASE))
    return y.permute(1, 2, 0, 3).reshape(-1, channels, rows, size)


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
    channels, rows, pairs, half = source.shape
    near = min(half, taps.shape[-1])  # a short kernel touches only the tokens next to the border
    if near == 0:
        return source.new_zeros(taps.shape[0], channels, rows, pairs, half)
    source = torch.where(source_alive, source, 0.0)[..., half - near :].reshape(channels, rows * pairs, near)
    taps = F.pad(taps[..., : 2 * near - 1], (0, max(0, 2 * near - 1 - taps.shape[-1])))
    if near <= LARGEST_MATRIX:
        matrix = toeplitz(taps).permute(1, 2, 0, 3).reshape(channels, near, -1)  # (D, h, F h)
        out = torch.bmm(source, matrix).view(channels, rows, pairs, -1, near).permute(3, 0, 1, 2, 4)
    else:
        size = fast_length(2 * near - 1)
        product = torch.fft.rfft(source, n=size) * torch.fft.rfft(taps, n=size).unsqueeze(-2)
        out = torch.fft.irfft(product, n=size)[..., near - 1 : 2 * near - 1]
        out = out.reshape(-1, channels, rows, pairs, near)
    return torch.where(target_alive, F.pad(out, (0, half - near)), 0.0)


# ---- ops/long_conv/__init__.py --------------------------------------------------------------------------------------
# Long convolution of every channel with its own filter: y = K * u + D u, causal or two-sided.

_OP = Op(
    "long_conv",
    builtin={"torch": long_conv_torch, "reference": long_conv_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.long_conv_triton"},
    self_check_inputs=self_check_inputs,
)


def long_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    *,
    future_kernel: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    stride: int | None = None,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Convolve each channel with a filter as long as the sequence, or longer.

        y_t = \sum_{k \ge 0} K_k u_{t-k} + \sum_{k \ge 1} F_{k-1} u_{t+k} + D u_t

    Args:
        u: (B, L, D), any floating dtype. Computed in float32, float64 if u or the kernel is float64.
        kernel: (G, K) or (F, G, K) taps of lags 0..K-1. G divides D: channel c uses filter c // (D / G). With F given,
            every channel has F filters and y is (B, L, F, D).
        future_kernel: like `kernel` with any number of taps, of lags -1, -2, ...: the two-sided form. None is causal.
        skip: (D,) or (F, D), the weight of the token itself; None leaves the term out.
        initial_state: (B, K-1, D) the K - 1 inputs before this piece, oldest first (zeros: the start of a sequence).
            They belong to the row's first document.
        seq_idx: (B, L) int, documents of a packed row; no output depends on another document.
        lengths: (B,) int, number of real tokens at the front of each row; the rest is not read.
        return_final_state: also return the last K - 1 inputs of the row's last document (causal only).
        stride: give y only at the tokens stride - 1, 2 stride - 1, ...; causal ones are then contracted one by one.
        positions: (B, J) int64, give y only at these tokens of each row (0..L-1), likewise.

    Returns:
        y (B, L, [F,] D), or (B, L // stride, [F,] D), or (B, J, [F,] D), in u's dtype, and the final state (B, K-1, D)
        in the computing dtype or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    batch, length, channels = _check(u, kernel, future_kernel)
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    check_output_positions(stride, positions, batch, length)
    dtype = torch.float64 if torch.float64 in (u.dtype, kernel.dtype) else torch.float32
    filters = _expand(kernel, channels).to(dtype)
    future = None if future_kernel is None else _expand(future_kernel, channels).to(dtype)
    if skip is not None:
        check_tensor("skip", skip, (channels,) if kernel.dim() == 2 else (filters.shape[0], channels), "[F,] D")
        skip = skip.to(dtype).view(-1, channels)
    past = kernel.shape[-1] - 1
    check_tensor("initial_state", initial_state, (batch, past, channels), "B, K-1, D", optional=True)
    if future is not None and (initial_state is not None or return_final_state):
        raise ValueError("initial_state and return_final_state need a causal convolution, got a future_kernel.")
    run = _OP.select(u.device.type, u.dtype, backend)
    with without_autocast(u.device.type):
        x = zero_beyond(u, lengths)
        history = filters.new_zeros(batch, 0, channels) if initial_state is None else initial_state.to(dtype)
        if (stride is None and positions is None) or future is not None:
            y = run(x, filters, future, skip, history, seq_idx)
            if stride is not None or positions is not None:
                y = take_outputs(y.flatten(2), stride, positions).unflatten(-1, y.shape[2:])
        else:
            y = sampled(x.to(dtype), filters, skip, history, seq_idx, stride, positions)
        final = last_inputs(x.to(dtype), past + 1, initial_state, seq_idx, lengths) if return_final_state else None
    return (y.squeeze(2) if kernel.dim() == 2 else y).to(u.dtype), final


def _check(u: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None) -> tuple[int, int, int]:
    check_tensor("u", u, (None, None, None), "B, L, D")
    if not u.is_floating_point():
        raise TypeError(f"u must be floating point, got {u.dtype}.")
    for name, value in (("kernel", kernel), ("future_kernel", future_kernel)):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() not in (2, 3):
            raise ValueError(f"{name} must be a tensor (G, K) or (F, G, K), got {getattr(value, 'shape', value)!r}.")
        if value.shape[-2] < 1 or u.shape[2] % value.shape[-2]:
            raise ValueError(
                f"{name} has {value.shape[-2]} filters, which must divide the {u.shape[2]} channels of u."
            )
    if kernel.shape[-1] < 1:
        raise ValueError("kernel must have at least one tap (lag 0), got 0.")
    if future_kernel is not None and future_kernel.shape[:-2] != kernel.shape[:-2]:
        raise ValueError(f"future_kernel must have as many filters as kernel, got {tuple(future_kernel.shape)}.")
    return u.shape[0], u.shape[1], u.shape[2]


def _expand(kernel: torch.Tensor, channels: int) -> torch.Tensor:
    """(G, K) or (F, G, K) -> (F, D, K): each of the G filters serves D / G neighbouring channels."""
    kernel = kernel.unsqueeze(0) if kernel.dim() == 2 else kernel
    return kernel.repeat_interleave(channels // kernel.shape[1], dim=1) if kernel.shape[1] != channels else kernel
