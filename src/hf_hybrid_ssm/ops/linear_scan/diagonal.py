r"""Diagonal recurrence whose states are themselves the result: h_t = a h_{t-1} + x_t (S5)."""

import torch

from hf_hybrid_ssm.ops._core.autocast import without_autocast
from hf_hybrid_ssm.ops._core.checks import check_seq_idx, check_tensor
from hf_hybrid_ssm.ops._core.dispatch import Op
from hf_hybrid_ssm.ops._core.lengths import check_lengths
from hf_hybrid_ssm.ops.linear_scan import reference

BLOCK = 32
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def diagonal_scan(
    decay: torch.Tensor,
    x: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""All states of a time-invariant diagonal recurrence, in memory linear in L.

        h_t = a h_{t-1} + x_t

    Args:
        decay: (M,) a, of x's dtype, or twice as precise: then its powers are taken so and rounded once. An a near 1
            rounded to float32 forgets at another rate than a, by as many roundings as it remembers tokens.
        x: (B, L, M), real (float32, float64) or complex (complex64, complex128).
        initial_state: (B, M) the state before the first token, of the row's first document (zeros when None).
        seq_idx: (B, L) int, documents of a packed row; the state starts at zero where it changes.
        lengths: (B,) int, number of real tokens at the front of each row; it moves only the final state.
        return_final_state: also return the state after each row's last real token.

    Returns:
        h (B, L, M), and the final state (B, M) or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    check_tensor("x", x, (None, None, None), "B, L, M")
    if x.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise TypeError(f"x must be float32, float64, complex64 or complex128, got {x.dtype}.")
    batch, length, size = x.shape
    is_wide = isinstance(decay, torch.Tensor) and decay.dtype == _WIDE.get(x.dtype)
    check_tensor("decay", decay, (size,), "M", like=x.new_empty(0, dtype=decay.dtype) if is_wide else x)
    check_tensor("initial_state", initial_state, (batch, size), "B, M", like=x, optional=True)
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    start = x.new_zeros(batch, size) if initial_state is None else initial_state
    scan = _OP.select(x.device.type, x.dtype, backend)
    with without_autocast(x.device.type):
        h = scan(decay, x, start, seq_idx)
    if not return_final_state:
        return h, None
    if lengths is None:
        return h, h[:, -1] if length else start
    every = torch.cat([start.unsqueeze(1), h], dim=1)
    return h, every.gather(1, lengths.to(torch.int64).view(-1, 1, 1).expand(-1, 1, size)).squeeze(1)


def run(
    decay: torch.Tensor, x: torch.Tensor, initial_state: torch.Tensor, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    """Block form; arguments as in `reference.diagonal_scan`."""
    batch, length, size = x.shape
    if length == 0 or batch == 0:
        return x
    blocks = -(-length // BLOCK)
    gap = blocks * BLOCK - length
    padded = torch.cat([x, x.new_zeros(batch, gap, size)], dim=1) if gap else x
    documents = None
    if seq_idx is not None:
        documents = torch.cat([seq_idx, seq_idx[:, -1:].expand(batch, gap)], dim=1).view(batch, blocks, BLOCK)
    powers = _powers(decay, BLOCK).to(x.dtype)  # (w + 1, M)
    inside = _inside(padded.view(batch, blocks, BLOCK, size), powers, documents)
    starts = _carry(inside[:, :, -1], powers[-1], initial_state, documents)
    carried = powers[1:] * starts.unsqueeze(2)
    if documents is not None:
        carried = torch.where((documents == _before(documents).unsqueeze(-1)).unsqueeze(-1), carried, 0.0)
    return (inside + carried).view(batch, blocks * BLOCK, size)[:, :length]


def _powers(decay: torch.Tensor, count: int) -> torch.Tensor:
    """a^0 ... a^count, (count + 1, M), by doubling."""
    rows = torch.ones_like(decay).unsqueeze(0)
    step = decay
    while rows.shape[0] <= count:
        rows = torch.cat([rows, rows * step])
        step = step * step
    return rows[: count + 1]


def _before(documents: torch.Tensor) -> torch.Tensor:
    """(B, n): the document of the token before each block; the initial state belongs to the row's first document."""
    return torch.cat([documents[:, :1, 0], documents[:, :-1, -1]], dim=1)


def _inside(tokens: torch.Tensor, powers: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """States of every block started at zero. tokens (B, n, w, M) -> (B, n, w, M)."""
    batch, blocks, block, size = tokens.shape
    if documents is None:
        lag = torch.arange(block, device=tokens.device)
        lag = lag.unsqueeze(0) - lag.unsqueeze(1)  # row: input, column: output
        matrix = torch.where((lag >= 0).unsqueeze(-1), powers[lag.clamp(min=0)], 0.0).permute(2, 0, 1)  # (M, w, w)
        rows = tokens.permute(3, 0, 1, 2).reshape(size, batch * blocks, block)
        return torch.bmm(rows, matrix).view(size, batch, blocks, block).permute(1, 2, 3, 0)
    half, h = 1, tokens
    while half < block:  # the state at the end of the left half enters the right half where its document goes on
        pairs = h.reshape(batch, blocks, block // (2 * half), 2, half, size)
        spans = documents.reshape(batch, blocks, block // (2 * half), 2, half)
        same = (spans[..., 1, :] == spans[..., 0, -1:]).unsqueeze(-1)
        entering = powers[1 : half + 1] * pairs[..., 0, -1:, :]
        right = pairs[..., 1, :, :] + torch.where(same, entering, 0.0)
        h = torch.stack([pairs[..., 0, :, :], right], dim=3)
        half *= 2
    return h.reshape(batch, blocks, block, size)


def _carry(
    ends: torch.Tensor, decay: torch.Tensor, initial_state: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """The state at every block's start (B, n, M), from the blocks' own contributions `ends` (B, n, M)."""
    state, starts = initial_state, []
    kept = None if documents is None else (_before(documents) == documents[..., -1]).unsqueeze(-1)
    for i, end in enumerate(ends.unbind(1)):
        starts.append(state)
        moved = decay * state
        state = end + (moved if kept is None else torch.where(kept[:, i], moved, 0.0))
    return torch.stack(starts, dim=1)


_OP = Op("diagonal_scan", builtin={"torch": run, "reference": reference.diagonal_scan})
