"""The fused CPU backend: convolution by Fourier transforms, attention of each token, and decoding, in `native.c`."""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.c_function import CFunction
from hf_hybrid_ssm.ops.core.constants import constant
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op
from hf_hybrid_ssm.ops.core.native_library import is_plain_call, library_beside, prepared, supports
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.implicit_attention.decoding import DECODE, is_exact_gelu
from hf_hybrid_ssm.ops.implicit_attention.torch_backend import implicit_attention_torch
from hf_hybrid_ssm.ops.legendre_memory.constants import BlockOperators, block_operators, finite_response

__all__ = ["implicit_attention_native", "supports"]

CHUNK = 16  # as in native.c
POINTS = tuple(2**k for k in range(5, 22))  # that a transform may have
NAMES = ("weight", "bias", "collapse", "collapse_bias")
_library = library_beside(__file__)
# R rows of queries (of keys, of values), T taps, memory of order Q, C tokens between its steps
_INPUTS = "x[B L D], taps[3R T], bias?[3 R], collapse[R]"
FORWARD = CFunction(
    _library,
    "implicit_attention_forward",
    f"{_INPUTS}, offset?[1], scale[1], m[B L D]",
    "B, L, D, R, T, points, segment",
)
BACKWARD = CFunction(
    _library,
    "implicit_attention_backward",
    f"{_INPUTS}, offset?[1], scale[1], dm[B L D], dx[B L D], dtaps[3R T], sums[S 4R]",
    "B, L, D, R, T, points, segment",
)
STEP = CFunction(
    _library,
    "implicit_attention_step",
    """x[B 1 D], weight[3 R Q], bias?[3 R], collapse[R], offset?[1], scale[1], powers[Q C Q], impulse[Q C], push[Q C],
    s[B Q D], recent[B C D], pending[B] int64, m[B 1 D], new_s[B Q D], is_new[1] int64""",
    "B, D, R, Q, C, copies",
    refuses="pending must say how many of the C tokens since the memory there are, 0 to C of them.",
)


def implicit_attention_native(
    x: Tensor,
    *,
    activation: Callable[[Tensor], Tensor],
    theta: float,
    state: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    form: str,
    return_final_state: bool,
    **parameters: Any,
) -> tuple[Tensor, Tensor | None]:
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; what the kernel does not do runs in torch."""
    if form not in ("auto", "fft") or state is not None or x.shape[1] == 0 or not is_exact_gelu(activation):
        options: dict[str, Any] = {
            "theta": theta,
            "state": state,
            "lengths": lengths,
            "scale": scale,
            "return_final_state": return_final_state,
        }
        return implicit_attention_torch(x, activation=activation, form=form, **options, **parameters)
    inputs = [prepared(tensor) for tensor in (x, *(parameters[name] for name in NAMES))]
    with without_autocast(x.device.type):
        y, final = _attention(*inputs, lengths, scale, theta, return_final_state)
    return y.to(x.dtype), final if return_final_state else None


def transform_sizes(length: int, taps: int) -> tuple[int, int]:
    """Points of the transforms and new tokens in each, so that a row of `length` tokens costs least."""
    sizes = [(points, min(length, points - taps + 1)) for points in POINTS if points >= taps]
    return min(sizes, key=lambda size: -(-length // size[1]) * size[0] * size[0].bit_length())


@constant
def _scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


class _Problem:
    """What forward and backward share: filters, sizes, and the arguments in the order of C."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        collapse: Tensor,
        collapse_bias: Tensor | None,
        scale: float,
        theta: float,
    ) -> None:
        order = weight.shape[2]
        self.response = finite_response(order, theta, x.shape[1])
        self.taps = weight.flatten(0, 1) @ self.response
        self.points, self.segment = transform_sizes(x.shape[1], self.taps.shape[1])
        self.tensors = (x, self.taps, bias, collapse, collapse_bias, _scalar(scale))

    def steps_back(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T, 1) the token k steps before each row's last, and whether there is one."""
        if lengths is None:
            lengths = torch.full((x.shape[0],), x.shape[1])
        lengths = lengths.clamp(0, x.shape[1])
        index = lengths.unsqueeze(1) - 1 - torch.arange(self.taps.shape[1])
        return index.clamp(min=0).unsqueeze(2).expand(-1, -1, x.shape[2]), (index >= 0).unsqueeze(2)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    collapse_bias: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    theta: float,
    return_final_state: bool,
) -> tuple[Tensor, Tensor]:
    """y (B, L, D) and the memory (B, q, D), empty if it is not needed."""
    problem, y = _Problem(x, weight, bias, collapse, collapse_bias, scale, theta), torch.empty_like(x)
    FORWARD((*problem.tensors, y), problem.points, problem.segment)
    if not return_final_state:
        return y, x.new_empty(0)
    if lengths is None:
        last = x[:, -problem.taps.shape[1] :]
        return y, problem.response[:, : last.shape[1]].flip(1) @ last
    index, is_real = problem.steps_back(x, lengths)
    return y, problem.response @ torch.where(is_real, x.gather(1, index), 0.0)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    collapse_bias: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    theta: float,
    return_final_state: bool,
) -> tuple[Tensor, Tensor]:
    final = x.new_empty(x.shape[0], weight.shape[2], x.shape[2]) if return_final_state else x.new_empty(0)
    return torch.empty_like(x), final


def _backward(inputs: Sequence, gradients: Sequence[Tensor], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, collapse and collapse_bias."""
    x, weight, bias, collapse, _, lengths, scale, theta, return_final_state = inputs
    dy, dfinal = (part.contiguous() for part in gradients)
    # autocast may be active around backward() as well
    with without_autocast(x.device.type):
        problem, reduced = _Problem(x, weight, bias, collapse, None, scale, theta), weight.shape[1]
        dx, dtaps = torch.zeros_like(x), torch.empty_like(problem.taps)
        sums = x.new_zeros(-(-problem.segment // CHUNK), 4 * reduced)
        BACKWARD((*problem.tensors, dy, dx, dtaps, sums), problem.points, problem.segment)
        if return_final_state:
            index, is_real = problem.steps_back(x, lengths)
            dx.scatter_add_(1, index, torch.where(is_real, problem.response.mT @ dfinal, 0.0))
        dbias, dcollapse = sums.sum(0).split([3 * reduced, reduced])
        dweight = (dtaps @ problem.response.mT).view_as(weight)
        return dx, dweight, dbias.view(3, reduced).clone(), dcollapse.clone(), dy.sum().view(1)


def _flops(
    x: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    collapse: Sequence[int],
    collapse_bias: Sequence[int] | None,
    lengths: Sequence[int] | None,
    scale: float,
    theta: float,
    return_final_state: bool,
) -> float:
    return sum(_parts_of_flops(x, weight, theta))


def _backward_flops(
    x: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    collapse: Sequence[int],
    collapse_bias: Sequence[int] | None,
    lengths: Sequence[int] | None,
    scale: float,
    theta: float,
    return_final_state: bool,
) -> float:
    convolution, attention = _parts_of_flops(x, weight, theta)
    return 2 * convolution + 3 * attention  # forward once more; then transforms back, and two products of attention


def _parts_of_flops(x: Sequence[int], weight: Sequence[int], theta: float) -> tuple[float, float]:
    """Convolution: a real transform (2.5 n log2 n) of x and of each of the 3 R rows, and their products with the
    filters' spectra. Attention of each token: the logits, and the values' sum."""
    (batch, length, channels), (_, reduced, order) = x, weight
    points, segment = transform_sizes(length, finite_response(order, theta, length).shape[1])
    transforms = (1 + 3 * reduced) * 2.5 * points * math.log2(points) + 3 * reduced * 3 * points
    attention = 2 * batch * length * channels * reduced * (reduced + 1)
    return batch * -(-length // segment) * channels * transforms, attention


_attention = differentiable_op(
    "hf_hybrid_ssm::implicit_attention_native",
    _forward,
    _backward,
    _fake,
    device_types="cpu",
    flops=_flops,
    backward_flops=_backward_flops,
)


def decode_token(
    x: Tensor,
    memory: Tensor,
    recent: Tensor,
    pending: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    collapse_bias: Tensor | None,
    scale: float,
    theta: float,
) -> tuple[Tensor, ...]:
    """One token x (B, 1, D), without gradients: its output and the states after it, see `decoding`."""
    inputs = [prepared(tensor) for tensor in (x, weight, bias, collapse, collapse_bias, memory, recent)]
    compute = _step_without_copies if is_plain_call(x) else _step
    y, *states = compute(*inputs, pending, scale, theta)
    return y.to(x.dtype), *states


setattr(implicit_attention_native, DECODE, decode_token)


def _compute_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    collapse_bias: Tensor | None,
    memory: Tensor,
    recent: Tensor,
    pending: Tensor,
    scale: float,
    theta: float,
    *,
    copies: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """As `_step`; whether the memory is a new one."""
    operators = BlockOperators(*block_operators(weight.shape[2], theta, recent.shape[1], x.dtype, device=x.device))
    y, recent, pending = torch.empty_like(x), recent.clone(), pending.clone().contiguous()
    after, is_new = torch.empty_like(memory), torch.empty(1, dtype=torch.int64)
    parameters = (weight, bias, collapse, collapse_bias, _scalar(scale))
    tensors = (x, *parameters, operators.powers, operators.impulse, operators.push, memory)
    STEP((*tensors, recent, pending, y, after, is_new), copies)
    # read from memory: `is_new.item()` would be a synchronisation to all that counts them
    return y, after, recent, pending, ctypes.c_int64.from_address(is_new.data_ptr()).value


def _step_without_copies(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_step`, for plain tensors: a memory that stays as it is is not copied."""
    y, after, recent, pending, is_new = _compute_step(*inputs, copies=False)
    return y, after if is_new else inputs[5], recent, pending


@torch.library.custom_op("hf_hybrid_ssm::implicit_attention_step_native", mutates_args=(), device_types="cpu")
def _step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    collapse_bias: Tensor | None,
    memory: Tensor,
    recent: Tensor,
    pending: Tensor,
    scale: float,
    theta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (B, 1, D) and the states after the token."""
    states = (memory, recent, pending)
    return _compute_step(x, weight, bias, collapse, collapse_bias, *states, scale, theta, copies=True)[:4]


@_step.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    collapse: Tensor,
    collapse_bias: Tensor | None,
    memory: Tensor,
    recent: Tensor,
    pending: Tensor,
    scale: float,
    theta: float,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in (x, memory, recent, pending))
