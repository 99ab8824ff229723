"""The recurrences, token by token."""

import torch

from hf_hybrid_ssm.ops._core.lengths import zero_beyond
from hf_hybrid_ssm.ops._core.output_positions import take_outputs
from hf_hybrid_ssm.ops.linear_scan.transition import Transition


def diagonal_scan_reference(decay, x, initial_state, seq_idx):
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


def channel_scan_reference(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions, *,
    form, blocks=None
):  # fmt: skip
    """s_t = A s_{t-1} + B u_t, y_t = C s_t + D u_t; shapes as in `channel_scan_torch`."""
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
    y = take_outputs(y.flatten(2), stride, positions).unflatten(-1, y.shape[2:])
    return y, (state if return_final_state else None)
