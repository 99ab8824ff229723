"""One token of linear systems in torch."""

import torch
import torch.nn.functional as F


def linear_step_torch(u, state, change, input_vector, *, output_rows, low_rank, skip, is_complex, silu):
    """See `hf_hybrid_ssm.ops.linear_step.linear_step`."""
    h, value = state.to(change.dtype), u.to(change.dtype)[:, None, :, None]
    if is_complex:
        moved = torch.view_as_real(_complex(change) * _complex(h)).flatten(-2)
    else:
        moved = change * h
    if low_rank is not None:
        left, right = low_rank
        moved = torch.addcmul(moved, left, torch.linalg.vecdot(right, h).unsqueeze(-1), value=-1)
    after = h + torch.addcmul(moved, input_vector, value)
    state.copy_(after)
    if output_rows is None:
        return None, state
    y = torch.linalg.vecdot(output_rows, after)
    y = y if skip is None else torch.addcmul(y, skip, value.squeeze(-1))
    return (F.silu(y) if silu else y).to(u.dtype), state


def _complex(pairs: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(pairs.contiguous().unflatten(-1, (-1, 2)))
