"""The recurrences, token by token."""

import torch


def diagonal_scan_reference(decay, x, initial_state, seq_idx):
    """h_t = a h_{t-1} + x_t, with h = 0 before the first token of a document. decay (M,), x (B, L, M) -> (B, L, M).

    Each product is taken in the wider of the two dtypes and rounded to x's.
    """
    state, states = initial_state, []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            state = torch.where((seq_idx[:, t] == seq_idx[:, t - 1]).unsqueeze(-1), state, torch.zeros_like(state))
        state = (decay * state + x[:, t]).to(x.dtype)
        states.append(state)
    return torch.stack(states, dim=1) if states else x


def channel_scan_reference(u, system, initial_state, seq_idx, lengths, return_final_state, stride, positions=None):
    """s_t = A s_{t-1} + B u_t, y_t = C s_t; shapes as in `channel.channel_scan`."""
    transition, b, c = system.powers[0], system.krylov[:, :, 0], system.output
    batch, length, channels = u.shape
    state, outputs = initial_state, []
    for t in range(length):
        real = torch.ones(batch, dtype=torch.bool, device=u.device) if lengths is None else t < lengths
        real = real.view(-1, 1, 1, 1)
        before = state
        if seq_idx is not None and t > 0:
            same = (seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1)
            before = torch.where(same, state, 0.0)
        token = torch.where(real.squeeze(-1), u[:, t].unsqueeze(1), 0.0)
        following = transition.apply(before.unsqueeze(-2)).squeeze(-2) + b * token.unsqueeze(-1)
        state = torch.where(real, following, state)
        outputs.append((c * following).sum(-1))
    y = torch.stack(outputs, dim=1) if outputs else u.new_zeros(batch, 0, c.shape[0], channels)
    if positions is not None:
        y = y[torch.arange(batch, device=u.device).unsqueeze(1), positions]
    return (y if stride is None else y[:, stride - 1 :: stride]), (state if return_final_state else None)
