"""The recurrences, token by token."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.output_positions import ALL_OUTPUTS, OutputPositions
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.self_check import draw
from hf_hybrid_ssm.ops.linear_scan.transition import Transition


def diagonal_scan_reference(
    decay: torch.Tensor, x: torch.Tensor, initial_state: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    """h_t = a h_{t-1} + x_t, with h = 0 before the first token of a document; shapes as in `diagonal_scan_torch`.

    Each product is taken in the wider of the two dtypes and rounded to x's.
    """
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
    return torch.view_as_real(h) if is_complex else h


def lti_scan_reference(
    u: torch.Tensor,
    decay: torch.Tensor,
    vector: torch.Tensor,
    output: torch.Tensor,
    skip: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    return_final_state: bool,
    wanted: OutputPositions,
    *,
    form: str,
    blocks: object = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """s_t = A s_{t-1} + B u_t, y_t = C s_t + D u_t; shapes as in `lti_scan_torch`."""
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
    return wanted.take(y), (state if return_final_state else None)


def _decays(*shape: int) -> torch.Tensor:
    """Complex numbers inside of the unit circle as pairs (..., 2), most of them near it."""
    size, angle = draw({"size": shape, "angle": shape}).values()
    return torch.view_as_real(torch.polar(torch.sigmoid(3 + 2 * size), 3 * angle))


def diagonal_inputs() -> dict:
    """Longer than a block, with a state before the first token and decays near 1."""
    return draw({"x": (2, 75, 5, 2), "initial_state": (2, 5, 2)}) | {"decay": _decays(5), "seq_idx": None}


def aligned_diagonal_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models."""
    return draw({"x": (1, 75, 16, 2), "initial_state": (1, 16, 2)}) | {"decay": _decays(16), "seq_idx": None}


def channel_inputs() -> dict:
    """The same, for two filters of three channels."""
    shapes = {"u": (2, 75, 3), "vector": (2, 3, 6), "output": (2, 3, 6), "skip": (2, 3), "initial_state": (2, 2, 3, 6)}
    options = {"seq_idx": None, "lengths": None, "wanted": ALL_OUTPUTS, "form": "complex"}
    return draw(shapes) | options | {"decay": _decays(2, 3, 3), "return_final_state": True}


def aligned_channel_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models: 16 channels, and as many states."""
    system = (1, 16, 32)
    shapes = {"u": (1, 75, 16), "vector": system, "output": system, "skip": (1, 16), "initial_state": (1, *system)}
    options = {"seq_idx": None, "lengths": None, "wanted": ALL_OUTPUTS, "form": "complex"}
    return draw(shapes) | options | {"decay": _decays(1, 16, 16), "return_final_state": True}


def linear_step_reference(
    u: torch.Tensor,
    state: torch.Tensor,
    decay_minus_one: torch.Tensor,
    input_vector: torch.Tensor,
    *,
    output_rows: torch.Tensor | None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None,
    skip: torch.Tensor | None,
    is_complex: bool,
    silu: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.linear_scan.lti_token`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    h, value, a, b = state.to(dtype), u.to(dtype).unsqueeze(-1), decay_minus_one.to(dtype), input_vector.to(dtype)
    if is_complex:
        (real, imaginary), (x, y) = a.unflatten(-1, (-1, 2)).unbind(-1), h.unflatten(-1, (-1, 2)).unbind(-1)
        moved = torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)
    else:
        moved = a * h
    if low_rank is not None:
        left, right = (part.to(dtype) for part in low_rank)
        moved = moved - left * (right * h).sum(-1, keepdim=True)
    after = h + (moved + b * value)
    state.copy_(after)
    if output_rows is None:
        return None, state
    out = (output_rows.to(dtype) * after).sum(-1)
    out = out if skip is None else out + skip.to(dtype) * value.squeeze(-1)
    return (F.silu(out) if silu else out).to(u.dtype).unsqueeze(1), state


def step_inputs() -> dict:
    """Complex, with a product of rank one, states that do not fill a vector."""
    constants = dict.fromkeys(("decay_minus_one", "input_vector", "output_rows", "left", "right"), (2, 3, 22))
    tensors = draw({"u": (2, 1, 3), "state": (2, 2, 3, 22), "skip": (2, 3)} | constants)
    # a tuple of tensors would not be cast: every entry is bfloat16 already
    low_rank = tuple(tensors.pop(name).bfloat16().float() for name in ("left", "right"))
    return tensors | {"low_rank": low_rank, "is_complex": True, "silu": True}
