"""The long convolution by one real FFT over time, with its own backward.

Autograd would take the backward of a real FFT through a complex one of the full size, twice as long. And the spectra
of all channels together are many times a processor's cache, so that the time would go into fetching memory: on CPU a
few channels at a time go all the way through.
"""

from collections.abc import Iterator
from typing import Any

import torch

from hf_hybrid_ssm.ops.core.transforms import is_transforming

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
    def forward(u: torch.Tensor, kernel: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
