"""The recurrences, token by token."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.output_positions import ALL_OUTPUTS, OutputPositions
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.self_check import draw
from hf_hybrid_ssm.ops.linear_scan.transition import Transition


class DiagonalInputs(NamedTuple):
    """What implementations of `diagonal_scan` take, checked, in the order of C; complex numbers are pairs (..., 2).

    Args:
        x: (B, L, M) or (B, L, M, 2), B and L at least 1.
        decay: (M,) or (M, 2); as precise as x, or twice.
        state: before the first token, (B, M) or (B, M, 2); None for zeros.
        seq_idx: (B, L) or None.
    """

    x: torch.Tensor
    decay: torch.Tensor
    state: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None


class LtiInputs(NamedTuple):
    """What implementations of `lti_scan` take, checked, in the order of C; shapes as there.

    Args:
        decay: the transition's value, in this `form`.
        state: before the first token.
        returns_state: whether the final state is wanted.
        wanted: which outputs are.
        blocks: gives the block matrices where they are known already.
    """

    u: torch.Tensor
    decay: torch.Tensor
    vector: torch.Tensor
    output: torch.Tensor
    skip: torch.Tensor | None = None
    state: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    form: str = "real"
    returns_state: bool = True
    wanted: OutputPositions = ALL_OUTPUTS
    blocks: Any = None


class StepInputs(NamedTuple):
    """What `lti_token` and its implementations take, in the order of C: a token of F systems of N real numbers on each
    of D channels.

    What a token changes is small where memories are long, and its digits would be lost in a factor near 1.

    Args:
        u: (B, 1, D).
        state: s, (B, F, D, N), which is overwritten.
        decay_minus_one, input_vector: a and b, (F, D, N), all constants in one dtype, float32 or float64.
        left, right: l and r, (F, D, N) each, or neither.
        output_rows: c, (F, D, N); without it there is no output.
        skip: d, (F, D).
        is_complex: the N numbers are N / 2 pairs of a real and an imaginary part, and a s is a complex product (all
            others real).
        silu: act is SiLU instead of nothing.
    """

    u: torch.Tensor
    state: torch.Tensor
    decay_minus_one: torch.Tensor
    input_vector: torch.Tensor
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    output_rows: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    is_complex: bool = False
    silu: bool = False


def diagonal_scan_reference(inputs: DiagonalInputs) -> tuple[torch.Tensor]:
    """h_t = a h_{t-1} + x_t, with h = 0 before the first token of a document.

    Each product is taken in the wider of the two dtypes and rounded to x's.
    """
    x, decay, initial_state, seq_idx = inputs
    is_complex = decay.dim() == 2
    if is_complex:
        decay, x = torch.view_as_complex(decay), torch.view_as_complex(x)
        initial_state = None if initial_state is None else torch.view_as_complex(initial_state)
    state, states = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state, []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            state = torch.where((seq_idx[:, t] == seq_idx[:, t - 1]).unsqueeze(-1), state, torch.zeros_like(state))
        state = (decay * state + x[:, t]).to(x.dtype)
        states.append(state)
    h = torch.stack(states, dim=1)
    return (torch.view_as_real(h) if is_complex else h,)


def lti_scan_reference(inputs: LtiInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """s_t = A s_{t-1} + B u_t, y_t = C s_t + D u_t."""
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, form, *_ = inputs
    transition, u = Transition(decay, form), zero_beyond(u.to(output.dtype), lengths)
    batch, length, channels = u.shape
    state, outputs = u.new_zeros(batch, *output.shape) if initial_state is None else initial_state, []
    for t in range(length):
        real = torch.ones(batch, dtype=torch.bool, device=u.device) if lengths is None else t < lengths
        real = real.view(-1, 1, 1, 1)
        before = state
        if seq_idx is not None and t > 0:
            same = (seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1)
            before = torch.where(same, state, 0.0)
        token = u[:, t].unsqueeze(1)
        following = transition.apply(before.unsqueeze(-2)).squeeze(-2) + vector * token.unsqueeze(-1)
        state = torch.where(real, following, state)
        outputs.append((output * following).sum(-1) + (0.0 if skip is None else skip * token))
    y = torch.stack(outputs, dim=1) if outputs else u.new_zeros(batch, 0, output.shape[0], channels)
    return inputs.wanted.take(y), (state if inputs.returns_state else None)


def _decays(*shape: int) -> torch.Tensor:
    """Complex numbers inside of the unit circle as pairs (..., 2), most of them near it."""
    size, angle = draw({"size": shape, "angle": shape}).values()
    return torch.view_as_real(torch.polar(torch.sigmoid(3 + 2 * size), 3 * angle))


def _diagonal_example(batch: int, channels: int) -> DiagonalInputs:
    """Longer than a block, with a state before the first token and decays near 1."""
    tensors = draw({"x": (batch, 75, channels, 2), "state": (batch, channels, 2)})
    return DiagonalInputs(**tensors, decay=_decays(channels))


def _lti_example(batch: int, *system: int) -> LtiInputs:
    """The same, for filters of channels."""
    filters, channels, size = system
    shapes = {"u": (batch, 75, channels), "vector": system, "output": system, "skip": (filters, channels)}
    tensors = draw(shapes | {"state": (batch, *system)})
    return LtiInputs(**tensors, decay=_decays(filters, channels, size // 2), form="complex")


# the second ones have rows that begin at multiples of 16 bytes, as those of models: 16 channels, and as many states
DIAGONAL_EXAMPLES = (lambda: _diagonal_example(2, 5), lambda: _diagonal_example(1, 16))
LTI_EXAMPLES = (lambda: _lti_example(2, 2, 3, 6), lambda: _lti_example(1, 1, 16, 32))


def linear_step_reference(inputs: StepInputs) -> tuple[torch.Tensor | None, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.linear_scan.lti_token`; computes in float32, or in float64 for float64 inputs."""
    u, state, decay_minus_one, input_vector, left, right, output_rows, skip, is_complex, silu = inputs
    dtype = torch.promote_types(u.dtype, torch.float32)
    h, value, a, b = state.to(dtype), u.to(dtype).unsqueeze(-1), decay_minus_one.to(dtype), input_vector.to(dtype)
    if is_complex:
        (real, imaginary), (x, y) = a.unflatten(-1, (-1, 2)).unbind(-1), h.unflatten(-1, (-1, 2)).unbind(-1)
        moved = torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)
    else:
        moved = a * h
    if left is not None and right is not None:
        left, right = left.to(dtype), right.to(dtype)
        moved = moved - left * (right * h).sum(-1, keepdim=True)
    after = h + (moved + b * value)
    state.copy_(after)
    if output_rows is None:
        return None, state
    out = (output_rows.to(dtype) * after).sum(-1)
    out = out if skip is None else out + skip.to(dtype) * value.squeeze(-1)
    return (F.silu(out) if silu else out).to(u.dtype).unsqueeze(1), state


def _step_example() -> StepInputs:
    """Complex, with a product of rank one, states that do not fill a vector."""
    constants = dict.fromkeys(("decay_minus_one", "input_vector", "output_rows", "left", "right"), (2, 3, 22))
    tensors = draw({"u": (2, 1, 3), "state": (2, 2, 3, 22), "skip": (2, 3)} | constants)
    return StepInputs(**tensors, is_complex=True, silu=True)


STEP_EXAMPLES = (_step_example,)
