"""One token of linear systems, by the equation."""

import torch

from hf_hybrid_ssm.ops._core.self_check import draw


def linear_step_reference(u, state, change, input_vector, *, output_rows, low_rank, skip, is_complex, silu):
    """See `hf_hybrid_ssm.ops.linear_step.linear_step`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    h, value, a, b = state.to(dtype), u.to(dtype)[:, None, :, None], change.to(dtype), input_vector.to(dtype)
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
    return (torch.nn.functional.silu(out) if silu else out).to(u.dtype), state


def self_check_inputs() -> dict:
    """Complex, with a product of rank one, states that do not fill a vector."""
    constants = dict.fromkeys(("change", "input_vector", "output_rows", "left", "right"), (2, 3, 22))
    tensors = draw({"u": (2, 3), "state": (2, 2, 3, 22), "skip": (2, 3)} | constants)
    # a tuple of tensors would not be cast: every entry is bfloat16 already
    low_rank = tuple(tensors.pop(name).bfloat16().float() for name in ("left", "right"))
    return tensors | {"low_rank": low_rank, "is_complex": True, "silu": True}
