"""What follows the real tokens of rows: hidden, given to the last document, left out of the last inputs."""

import torch


def zero_beyond(x: torch.Tensor, lengths: torch.Tensor | None, dim: int = 1) -> torch.Tensor:
    """x (B, ..., L, ...), 0 along `dim` after each row's length: a NaN there must not spread."""
    if lengths is None:
        return x
    batch, length = x.shape[0], x.shape[dim]
    real = torch.arange(length, device=x.device) < lengths.unsqueeze(1)
    return torch.where(real.view(batch, *[1] * (dim - 1), length, *[1] * (x.dim() - dim - 1)), x, 0.0)


def extend_last_document(seq_idx: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """seq_idx (B, L) with each row's padding assigned to its last real document, so that no state resets there."""
    last = seq_idx.gather(1, (lengths.long() - 1).clamp(min=0).unsqueeze(1))
    real = torch.arange(seq_idx.shape[1], device=seq_idx.device) < lengths.unsqueeze(1)
    return torch.where(real, seq_idx, last)


def last_inputs(
    x: torch.Tensor,
    width: int,
    initial_state: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The last K - 1 inputs of each row's last document, zero where that document is shorter; (B, K - 1, D).

    Args:
        x: (B, L, D).
        width: K, the taps.
        initial_state: (B, K - 1, D), the inputs before the row's first token, of its first document.
        seq_idx: (B, L) int.
        lengths: (B,) int.
    """
    batch, length, channels = x.shape
    if lengths is None and seq_idx is None and length >= width - 1:
        return x[:, length - width + 1 :].clone()
    if length == 0:
        return x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state.to(x.dtype)
    ends = torch.full((batch,), length, device=x.device) if lengths is None else lengths.long()
    columns = ends.unsqueeze(1) + torch.arange(1 - width, 0, device=x.device)  # negative ones lie in the state
    inside, index = columns >= 0, columns.clamp(min=0)
    state = x.gather(1, index.unsqueeze(-1).expand(-1, -1, channels))
    before: torch.Tensor | float = 0.0
    if initial_state is not None:
        early = (columns + width - 1).clamp(max=width - 2).unsqueeze(-1)
        before = initial_state.to(x.dtype).gather(1, early.expand(-1, -1, channels))
    state = torch.where(inside.unsqueeze(-1), state, before)
    if seq_idx is None:
        return state
    last = seq_idx.gather(1, (ends - 1).clamp(min=0).unsqueeze(1))
    return torch.where((seq_idx.gather(1, index) == last).unsqueeze(-1), state, 0.0)
