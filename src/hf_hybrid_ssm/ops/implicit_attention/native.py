"""The fused CPU backend: convolution by Fourier transforms, attention of each token, and decoding, in `native.c`."""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.constants import constant
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, filled, is_plain_call, step_op
from hf_hybrid_ssm.ops.core.native_library import CFunction, library_beside, prepared, supports
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.implicit_attention.decoding import DECODE, DeferredMemory, is_exact_gelu
from hf_hybrid_ssm.ops.implicit_attention.reference import ImplicitInputs
from hf_hybrid_ssm.ops.implicit_attention.torch_backend import implicit_attention_torch
from hf_hybrid_ssm.ops.legendre_memory.constants import BlockOperators, block_operators, finite_response

__all__ = ["implicit_attention_native", "supports"]

CHUNK = 16  # as in native.c
POINTS = tuple(2**k for k in range(5, 22))  # that a transform may have
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
    "B, D, R, Q, C",
    refuses="pending must say how many of the C tokens since the memory there are, 0 to C of them.",
)


def implicit_attention_native(inputs: ImplicitInputs) -> tuple[Tensor, Tensor | None]:
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; what the kernel does not do runs in torch."""
    x, is_exact = inputs.x, is_exact_gelu(inputs.activation)
    if inputs.form not in ("auto", "fft") or inputs.state is not None or x.shape[1] == 0 or not is_exact:
        return implicit_attention_torch(inputs)
    dense = (prepared(tensor) for tensor in inputs[:5])
    with without_autocast(x.device.type):
        y, final = _attention(*dense, inputs.theta, inputs.scale, None, inputs.lengths, inputs.returns_state, "fft")
    return y.to(x.dtype), final if inputs.returns_state else None


def transform_sizes(length: int, taps: int) -> tuple[int, int]:
    """Points of the transforms and new tokens in each, so that a row of `length` tokens costs least."""
    sizes = [(points, min(length, points - taps + 1)) for points in POINTS if points >= taps]
    return min(sizes, key=lambda size: -(-length // size[1]) * size[0] * size[0].bit_length())


@constant
def _scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


class _Problem:
    """What forward and backward share: filters, sizes, and the arguments in the order of C."""

    def __init__(self, inputs: ImplicitInputs) -> None:
        x, weight, bias, collapse, offset, theta, scale, *_ = inputs
        self.response = finite_response(inputs.order, theta, x.shape[1])
        self.taps = weight.flatten(0, 1) @ self.response
        self.points, self.segment = transform_sizes(x.shape[1], self.taps.shape[1])
        self.tensors = (x, self.taps, bias, collapse, offset, _scalar(scale))

    def steps_back(self, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """(B, T, 1) the token k steps before each row's last, and whether there is one."""
        if lengths is None:
            lengths = torch.full((x.shape[0],), x.shape[1])
        lengths = lengths.clamp(0, x.shape[1])
        index = lengths.unsqueeze(1) - 1 - torch.arange(self.taps.shape[1])
        return index.clamp(min=0).unsqueeze(2).expand(-1, -1, x.shape[2]), (index >= 0).unsqueeze(2)


def _forward(inputs: ImplicitInputs) -> tuple[Tensor, Tensor]:
    """y (B, L, D) and the memory (B, q, D), empty if it is not needed."""
    x, lengths, problem = inputs.x, inputs.lengths, _Problem(inputs)
    y = torch.empty_like(x)
    FORWARD((*problem.tensors, y), problem.points, problem.segment)
    if not inputs.returns_state:
        return y, x.new_empty(0)
    if lengths is None:
        last = x[:, -problem.taps.shape[1] :]
        return y, problem.response[:, : last.shape[1]].flip(1) @ last
    index, is_real = problem.steps_back(x, lengths)
    return y, problem.response @ torch.where(is_real, x.gather(1, index), 0.0)


def _fake(inputs: ImplicitInputs) -> tuple[Tensor, Tensor]:
    x = inputs.x
    final = x.new_empty(x.shape[0], inputs.order, x.shape[2]) if inputs.returns_state else x.new_empty(0)
    return torch.empty_like(x), final


def _backward(inputs: ImplicitInputs, gradients: Sequence, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, collapse and collapse_bias."""
    x, weight, *_ = inputs
    dy, dfinal = filled(gradients, lambda: _fake(inputs))
    # autocast may be active around backward() as well
    with without_autocast(x.device.type):
        problem, reduced = _Problem(inputs._replace(collapse_bias=None)), weight.shape[1]
        dx, dtaps = torch.zeros_like(x), torch.empty_like(problem.taps)
        sums = x.new_zeros(-(-problem.segment // CHUNK), 4 * reduced)
        BACKWARD((*problem.tensors, dy, dx, dtaps, sums), problem.points, problem.segment)
        if inputs.returns_state:
            index, is_real = problem.steps_back(x, inputs.lengths)
            dx.scatter_add_(1, index, torch.where(is_real, problem.response.mT @ dfinal, 0.0))
        dbias, dcollapse = sums.sum(0).split([3 * reduced, reduced])
        dweight = (dtaps @ problem.response.mT).view_as(weight)
        return dx, dweight, dbias.view(3, reduced).clone(), dcollapse.clone(), dy.sum().view(1)


def _backward_flops(shapes: Any) -> float:
    convolution, attention = _parts_of_flops(shapes)
    return 2 * convolution + 3 * attention  # forward once more; then transforms back, and two products of attention


def _parts_of_flops(shapes: Any) -> tuple[float, float]:
    """Convolution: a real transform (2.5 n log2 n) of x and of each of the 3 R rows, and their products with the
    filters' spectra. Attention of each token: the logits, and the values' sum."""
    (batch, length, channels), (_, reduced, order) = shapes.x, shapes.weight
    points, segment = transform_sizes(length, finite_response(order, shapes.theta, length).shape[1])
    transforms = (1 + 3 * reduced) * 2.5 * points * math.log2(points) + 3 * reduced * 3 * points
    attention = 2 * batch * length * channels * reduced * (reduced + 1)
    return batch * -(-length // segment) * channels * transforms, attention


_attention = differentiable_op(
    "hf_hybrid_ssm::implicit_attention_native",
    ImplicitInputs,
    _forward,
    _backward,
    _fake,
    device_types="cpu",
    flops=lambda shapes: sum(_parts_of_flops(shapes)),
    backward_flops=_backward_flops,
)


class _StepInputs(NamedTuple):
    """What C takes, and the memory's window."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    collapse: Tensor
    collapse_bias: Tensor | None
    memory: Tensor
    recent: Tensor
    pending: Tensor
    scale: float
    theta: float


def decode_token(
    inputs: ImplicitInputs, state: DeferredMemory, *, overwrites: bool = False
) -> tuple[Tensor, DeferredMemory]:
    """One token x (B, 1, D), without gradients: its output and the states after it, see `decoding`.

    Args:
        overwrites: they are computed in place of those that are given.
    """
    memory, recent, pending = state
    dense: Any = [*map(prepared, (*inputs[:5], memory, recent)), pending, inputs.scale, inputs.theta]
    given = _StepInputs(*dense)
    if not overwrites and is_plain_call(inputs.x):
        y, after = _step_beside(given)
        return y.to(inputs.x.dtype), after
    if not overwrites:
        given = given._replace(memory=memory.clone(), recent=recent.clone(), pending=pending.clone())
    after = DeferredMemory(given.memory, given.recent, given.pending)
    return _step(given).to(inputs.x.dtype), after


setattr(implicit_attention_native, DECODE, decode_token)


def _compute_step(inputs: _StepInputs, after: DeferredMemory) -> tuple[Tensor, bool]:
    """y (B, 1, D), and whether `after.memory`, where it is another one than that before, now holds the memory; the
    rest of what is after the token is changed in place."""
    x, weight, *tables, memory, held, _, scale, theta = inputs
    operators = BlockOperators(*block_operators(weight.shape[2], theta, held.shape[1], x.dtype, device=x.device))
    y, is_new = torch.empty_like(x), torch.empty(1, dtype=torch.int64)
    tensors = (x, weight, *tables, _scalar(scale), operators.powers, operators.impulse, operators.push, memory)
    STEP((*tensors, after.recent, after.pending, y, after.memory, is_new))
    # read from memory: `is_new.item()` would be a synchronisation to all that counts them
    return y, bool(ctypes.c_int64.from_address(is_new.data_ptr()).value)


def _step_beside(inputs: _StepInputs) -> tuple[Tensor, DeferredMemory]:
    """The states before stay as they are; a memory that no token changes is not copied."""
    held, pending = inputs.recent.clone(), inputs.pending.clone().contiguous()
    after = DeferredMemory(torch.empty_like(inputs.memory), held, pending)
    y, is_new = _compute_step(inputs, after)
    return y, after if is_new else after._replace(memory=inputs.memory)


def _step_in_place(inputs: _StepInputs) -> Tensor:
    """y (B, 1, D)."""
    return _compute_step(inputs, DeferredMemory(inputs.memory, inputs.recent, inputs.pending))[0]


_step = step_op(
    "hf_hybrid_ssm::implicit_attention_step_native",
    _step_in_place,
    lambda inputs: torch.empty_like(inputs.x),
    changes=("memory", "recent", "pending"),
    inputs=_StepInputs,
)
