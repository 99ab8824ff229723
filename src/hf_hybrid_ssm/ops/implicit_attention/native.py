"""The fused CPU backend: convolution by Fourier transforms, and the attention of each token, in `native.c`."""

import ctypes
from functools import cache
from pathlib import Path
from typing import List  # noqa: UP035

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_hybrid_ssm.ops._core.native_library import call, compile_and_load, prepared, supports
from hf_hybrid_ssm.ops.implicit_attention.torch_backend import implicit_attention_torch
from hf_hybrid_ssm.ops.legendre_memory.constants import finite_response

__all__ = ["implicit_attention_native", "supports"]

CHUNK = 16  # as in native.c
POINTS = tuple(2**k for k in range(5, 18))  # of one transform


def implicit_attention_native(x, *, weight, bias, collapse, collapse_bias, activation, theta, state, form, **options):
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; what the kernel does not do runs in torch."""
    if form != "fft" or state is not None or x.shape[1] == 0 or not is_exact_gelu(activation):
        parameters = {"weight": weight, "bias": bias, "collapse": collapse, "collapse_bias": collapse_bias}
        return implicit_attention_torch(
            x, **parameters, activation=activation, theta=theta, state=state, form=form, **options
        )
    inputs = [prepared(tensor) for tensor in (x, weight, bias, collapse)]
    y, final = _forward(*inputs, options["lengths"], options["scale"], theta, options["needs_state"])
    if collapse_bias is not None:
        y = y + collapse_bias.float()
    return y.to(x.dtype), final if options["needs_state"] else None


def is_exact_gelu(activation) -> bool:
    """Whether it is `F.gelu` without the approximation by tanh, as a function or one of the usual modules."""
    function = getattr(activation, "act", activation)  # transformers' GELUActivation holds it
    is_module = isinstance(function, torch.nn.GELU) and function.approximate == "none"
    return function is F.gelu or is_module


def transform_sizes(length: int, taps: int) -> tuple[int, int]:
    """Points of the transforms and new tokens in each, so that a row of `length` tokens costs least."""
    sizes = [(points, min(length, points - taps + 1)) for points in POINTS if points >= taps]
    return min(sizes, key=lambda size: -(-length // size[1]) * size[0] * size[0].bit_length())


@cache
def _library() -> ctypes.CDLL:
    return compile_and_load(Path(__file__).with_name("native.c"))


class _Problem:
    """What forward and backward share: filters, sizes, and the arguments in the order of C."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, collapse: Tensor, scale: float, theta: float):
        self.batch, self.length, channels = x.shape
        rows, order = weight.shape[1:]
        self.response = finite_response(order, theta, self.length)
        self.taps = weight.flatten(0, 1) @ self.response
        points, self.segment = transform_sizes(self.length, self.taps.shape[1])
        self.tensors = (x, self.taps, bias, collapse, x.new_tensor([scale]))
        self.sizes = (*x.shape, rows, self.taps.shape[1], points, self.segment)

    def window(self, lengths: Tensor | None) -> Tensor | None:
        """(B, T) the token that lies k steps before a row's last, negative before its first; None: all rows end together."""
        if lengths is None:
            return None
        return lengths.unsqueeze(1) - 1 - torch.arange(self.taps.shape[1])


@torch.library.custom_op("hf_hybrid_ssm::implicit_attention_native", mutates_args=(), device_types="cpu")
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    lengths: Tensor | None,
    scale: float,
    theta: float,
    needs_state: bool,
) -> tuple[Tensor, Tensor]:
    """y (B, L, D) without the bias of the collapse, and the memory (B, q, D), empty if it is not needed."""
    problem, y = _Problem(x, weight, bias, collapse, scale, theta), torch.empty_like(x)
    call(_library().implicit_attention_forward, (*problem.tensors, y), *problem.sizes)
    if not needs_state:
        return y, x.new_empty(0)
    back = problem.window(lengths)
    if back is None:
        last = x[:, -problem.taps.shape[1] :]
        return y, problem.response[:, : last.shape[1]].flip(1) @ last
    seen = x.gather(1, back.clamp(min=0).unsqueeze(2).expand(-1, -1, x.shape[2]))
    return y, problem.response @ torch.where((back >= 0).unsqueeze(2), seen, 0.0)


@_forward.register_fake
def _(x, weight, bias, collapse, lengths, scale, theta, needs_state):
    final = x.new_empty(x.shape[0], weight.shape[2], x.shape[2]) if needs_state else x.new_empty(0)
    return torch.empty_like(x), final


@torch.library.custom_op("hf_hybrid_ssm::implicit_attention_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    lengths: Tensor | None,
    dy: Tensor,
    dfinal: Tensor,
    scale: float,
    theta: float,
) -> List[Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """Gradients of x, weight, bias and collapse; dfinal is empty if the memory was not asked for."""
    problem, rows = _Problem(x, weight, bias, collapse, scale, theta), weight.shape[1]
    dx, dtaps = torch.zeros_like(x), torch.empty_like(problem.taps)
    sums = x.new_zeros(-(-problem.segment // CHUNK), 4 * rows)
    call(_library().implicit_attention_backward, (*problem.tensors, dy, dx, dtaps, sums), *problem.sizes)
    if dfinal.numel():
        dwindow = problem.response.mT @ dfinal  # (B, T, D)
        back = problem.window(torch.full((x.shape[0],), x.shape[1]) if lengths is None else lengths)
        dwindow = torch.where((back >= 0).unsqueeze(2), dwindow, 0.0)
        dx.scatter_add_(1, back.clamp(min=0).unsqueeze(2).expand_as(dwindow), dwindow)
    dbias, dcollapse = sums.sum(0).split([3 * rows, rows])
    return [dx, (dtaps @ problem.response.mT).view_as(weight), dbias.view(3, rows).clone(), dcollapse.clone()]


@_backward.register_fake
def _(x, weight, bias, collapse, lengths, dy, dfinal, scale, theta):
    return [torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[:2]), torch.empty_like(collapse)]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.scale, ctx.theta, ctx.needs_state = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dy, dfinal):
    saved = ctx.saved_tensors  # once: checkpointing unpacks them once
    dfinal = dfinal.contiguous() if ctx.needs_state else dy.new_empty(0)
    dx, dweight, dbias, dcollapse = _backward(*saved, dy.contiguous(), dfinal, ctx.scale, ctx.theta)
    return dx, dweight, None if saved[2] is None else dbias, dcollapse, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup_context)
