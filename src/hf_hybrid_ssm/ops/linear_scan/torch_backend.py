"""Both scans in block form (see `channel`): products over blocks, one short loop over block borders."""

from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops._core.toeplitz import causal_toeplitz
from hf_hybrid_ssm.ops.long_conv.fft import channels_first, channels_last
from hf_hybrid_ssm.ops.long_conv.torch_backend import block_conv

BLOCK = 32  # tokens, of the diagonal scan


def channel_scan_torch(u, system, initial_state, seq_idx, lengths, return_final_state, stride, positions=None):
    """y (B, L, F, D) and the final state (B, F, D, N); arguments as in `channel.channel_scan`, all in one dtype.

    After `lengths`, u is zero already.
    """
    batch, length, channels = u.shape
    filters, block = system.kernel.shape[0], system.block
    if length == 0 or batch == 0:
        kept = length if stride is None else length // stride
        kept = kept if positions is None else positions.shape[1]
        return u.new_zeros(batch, kept, filters, channels), initial_state if return_final_state else None
    blocks = -(-length // block)
    gap = blocks * block - length
    tokens = channels_first(F.pad(u, (0, 0, 0, gap)) if gap else u).view(channels, batch, blocks, block)
    documents = _document_blocks(seq_idx, block)
    starts = _block_starts(tokens, system, initial_state, documents)  # (F, D, B, n + 1, N)
    if positions is None:
        y = _outputs(tokens, system, starts, documents, length, stride)
    else:
        states = _states_after(u, system, starts, seq_idx, positions + 1)  # (F, D, B, J, N)
        y = torch.matmul(states, system.output[:, :, None, :, None]).squeeze(-1).permute(2, 3, 0, 1)
    final = _final_state(u, system, starts, seq_idx, lengths) if return_final_state else None
    return y, final


def _document_blocks(seq_idx: torch.Tensor | None, block: int) -> torch.Tensor | None:
    """(B, n, w): the document of each token of each block; the last one goes on to the end of the last block."""
    if seq_idx is None:
        return None
    batch, length = seq_idx.shape
    padding = seq_idx[:, -1:].expand(batch, -length % block)
    return torch.cat([seq_idx, padding], dim=1).view(batch, -1, block)


def _document_before_block(documents: torch.Tensor) -> torch.Tensor:
    """(B, n, 1): that of the token before each block; the initial state belongs to the row's first document."""
    return torch.cat([documents[:, :1, :1], documents[:, :-1, -1:]], dim=1)


def _block_starts(
    tokens: torch.Tensor, system: Any, initial_state: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """The states at every block's start and after the last block, (F, D, B, n + 1, N)."""
    channels, batch, blocks, block = tokens.shape
    filters, _, size = system.output.shape
    kept: torch.Tensor | None = None
    if documents is not None:
        last = documents[..., -1]
        tokens = torch.where(documents == last.unsqueeze(-1), tokens, 0.0)
        kept = _document_before_block(documents) == last.unsqueeze(-1)  # (B, n, 1): the state survives the whole block
    inputs = torch.bmm(tokens.reshape(channels, batch * blocks, block), system.input_to_state)
    inputs = inputs.view(channels, batch, blocks, filters, size).permute(2, 3, 0, 1, 4)  # (n, F, D, B, N)
    state = initial_state.permute(1, 2, 0, 3)
    states, block_power = [state], system.powers[-1]
    for i, added in enumerate(inputs.unbind()):  # not inputs[i], whose backward is as long as the row each time
        state = block_power.apply(state)
        if kept is not None:
            state = torch.where(kept[:, i], state, 0.0)
        state = state + added
        states.append(state)
    return torch.stack(states, dim=3)


def _outputs(
    tokens: torch.Tensor,
    system: Any,
    starts: torch.Tensor,
    documents: torch.Tensor | None,
    length: int,
    stride: int | None,
) -> torch.Tensor:
    """y (B, L, F, D), or its rows at every `stride`-th token."""
    channels, batch, blocks, block = tokens.shape
    filters, _, size = system.output.shape
    if stride is not None and stride > length:
        return tokens.new_zeros(batch, 0, filters, channels)
    if stride is not None and stride % block == 0:
        borders = starts[..., stride // block :: stride // block, :][..., : length // stride, :]
        return torch.matmul(borders, system.output[:, :, None, :, None]).squeeze(-1).permute(2, 3, 0, 1)
    flat = tokens.reshape(channels, batch * blocks, block)
    if documents is None:
        local = torch.bmm(flat, system.intra_block).view(channels, batch * blocks, filters, block).permute(2, 0, 1, 3)
    else:
        rows = flat.transpose(0, 1)  # (B n, D, w)
        local = block_conv(rows, system.kernel, None, documents.reshape(-1, block)).permute(1, 2, 0, 3)
    carried = torch.matmul(starts[..., :-1, :].reshape(filters, channels, -1, size), system.state_to_output.mT)
    if documents is not None:
        carried = torch.where((documents == _document_before_block(documents)).view(-1, block), carried, 0.0)
    y = (local + carried).reshape(filters, channels, batch, blocks * block)[..., :length]
    return channels_last(y if stride is None else y[..., stride - 1 :: stride])


def _final_state(
    u: torch.Tensor,
    system: Any,
    starts: torch.Tensor,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The state (B, F, D, N) after each row's last real token: from its block's start through the tokens after it."""
    batch, length, _ = u.shape
    block = system.block
    if lengths is None and length % block == 0:
        return starts[..., -1, :].permute(2, 0, 1, 3)
    count = torch.full((batch,), length, device=u.device) if lengths is None else lengths.to(torch.int64)
    return _states_after(u, system, starts, seq_idx, count.unsqueeze(1)).squeeze(3).permute(2, 0, 1, 3)


def _states_after(
    u: torch.Tensor, system: Any, starts: torch.Tensor, seq_idx: torch.Tensor | None, count: torch.Tensor
) -> torch.Tensor:
    """The states (F, D, B, J, N) after the first count (B, J) tokens of each row."""
    batch, _, channels = u.shape
    filters, _, size = system.output.shape
    block, number = system.block, count.shape[1]
    whole, rest = count // block, count % block
    index = whole.view(1, 1, batch, number, 1).expand(filters, channels, batch, number, size)
    state = starts.gather(3, index)
    # the last `rest` tokens, right-aligned in a window of w, so that each meets its own power of A
    window = count.unsqueeze(-1) - block + torch.arange(block, device=u.device)
    alive = window >= (whole * block).unsqueeze(-1)
    window = window.clamp(min=0).flatten(1)
    kept = torch.ones_like(count, dtype=torch.bool).unsqueeze(-1)
    if seq_idx is not None:
        last = seq_idx.gather(1, (count - 1).clamp(min=0))
        alive = alive & (seq_idx.gather(1, window).view_as(alive) == last.unsqueeze(-1))
        kept = ((seq_idx.gather(1, (whole * block - 1).clamp(min=0)) == last) | (rest == 0)).unsqueeze(-1)
    tail = u.gather(1, window.unsqueeze(-1).expand(-1, -1, channels)).view(*alive.shape, channels)
    tail = torch.where(alive.unsqueeze(-1), tail, 0.0)
    for bit, power in enumerate(system.powers[:-1]):
        moved = ((rest >> bit) & 1).bool().unsqueeze(-1)
        state = torch.where(moved, _apply(power, state), state)
    state = torch.where(kept, state, 0.0)
    added = torch.bmm(tail.permute(3, 0, 1, 2).reshape(channels, batch * number, block), system.input_to_state)
    return state + added.view(channels, batch, number, filters, size).permute(3, 0, 1, 2, 4)


def _apply(power: Any, state: torch.Tensor) -> torch.Tensor:
    """A s for states (F, D, B, J, N) of the (F, D) systems."""
    return power.apply(state.flatten(2, 3)).view(state.shape)


def diagonal_scan_torch(decay, x, initial_state, seq_idx):
    """h (B, L, M); arguments as in `reference.diagonal_scan_reference`."""
    batch, length, size = x.shape
    if length == 0 or batch == 0:
        return x
    blocks = -(-length // BLOCK)
    gap = blocks * BLOCK - length
    padded = torch.cat([x, x.new_zeros(batch, gap, size)], dim=1) if gap else x
    documents = _document_blocks(seq_idx, BLOCK)
    powers = _powers(decay, BLOCK).to(x.dtype)  # (w + 1, M)
    local = _states_from_zero(padded.view(batch, blocks, BLOCK, size), powers, documents)
    starts = _diagonal_starts(local[:, :, -1], powers[-1], initial_state, documents)
    carried = powers[1:] * starts.unsqueeze(2)
    if documents is not None:
        carried = torch.where((documents == _document_before_block(documents)).unsqueeze(-1), carried, 0.0)
    return (local + carried).view(batch, blocks * BLOCK, size)[:, :length]


def _powers(decay: torch.Tensor, count: int) -> torch.Tensor:
    """a^0 ... a^count, (count + 1, M), by doubling."""
    rows = torch.ones_like(decay).unsqueeze(0)
    step = decay
    while rows.shape[0] <= count:
        rows = torch.cat([rows, rows * step])
        step = step * step
    return rows[: count + 1]


def _states_from_zero(tokens: torch.Tensor, powers: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """States of every block started at zero. tokens (B, n, w, M) -> (B, n, w, M)."""
    batch, blocks, block, size = tokens.shape
    if documents is None:
        matrix = causal_toeplitz(powers[:block].mT)  # (M, w, w)
        rows = tokens.permute(3, 0, 1, 2).reshape(size, batch * blocks, block)
        return torch.bmm(rows, matrix).view(size, batch, blocks, block).permute(1, 2, 3, 0)
    half, h = 1, tokens
    while half < block:  # the state at the end of the left half enters the right half if its document continues
        pairs = h.reshape(batch, blocks, block // (2 * half), 2, half, size)
        spans = documents.reshape(batch, blocks, block // (2 * half), 2, half)
        same = (spans[..., 1, :] == spans[..., 0, -1:]).unsqueeze(-1)
        entering = powers[1 : half + 1] * pairs[..., 0, -1:, :]
        right = pairs[..., 1, :, :] + torch.where(same, entering, 0.0)
        h = torch.stack([pairs[..., 0, :, :], right], dim=3)
        half *= 2
    return h.reshape(batch, blocks, block, size)


def _diagonal_starts(
    ends: torch.Tensor, decay: torch.Tensor, initial_state: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """The state at every block's start (B, n, M), from the blocks' own contributions `ends` (B, n, M)."""
    state, starts = initial_state, []
    kept = None if documents is None else _document_before_block(documents) == documents[..., -1:]
    for i, end in enumerate(ends.unbind(1)):
        starts.append(state)
        moved = decay * state
        state = end + (moved if kept is None else torch.where(kept[:, i], moved, 0.0))
    return torch.stack(starts, dim=1)
