"""The recurrences in plain torch: the diagonal scan, and one token of a linear system.

The scan takes products inside of blocks, and the same scan over the states at their borders.
"""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.blocks import causal_toeplitz, document_before_block, document_blocks
from hf_hybrid_ssm.ops.core.complex_pairs import product_of_pairs
from hf_hybrid_ssm.ops.linear_scan.reference import DiagonalInputs, StepInputs
from hf_hybrid_ssm.ops.linear_scan.transition import power

BLOCK = 32  # tokens; the depth of the recursion is the logarithm of the length to this base


def diagonal_scan_torch(inputs: DiagonalInputs) -> tuple[torch.Tensor]:
    """h_t = a h_{t-1} + x_t, real or complex."""
    x, decay, state, seq_idx = inputs
    if decay.dim() == 1:
        return (_scan(decay, x, state, seq_idx),)
    start = None if state is None else torch.view_as_complex(state)
    return (torch.view_as_real(_scan(torch.view_as_complex(decay), torch.view_as_complex(x), start, seq_idx)),)


def _scan(
    decay: torch.Tensor, x: torch.Tensor, start: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    batch, length, size = x.shape
    block = min(BLOCK, 1 << (length - 1).bit_length())
    blocks = -(-length // block)
    gap = blocks * block - length
    padded = torch.cat([x, x.new_zeros(batch, gap, size)], dim=1) if gap else x
    documents = document_blocks(seq_idx, block)
    exponents = torch.arange(block + 1, device=x.device).unsqueeze(1)
    wide_powers = power(decay, exponents)
    powers = wide_powers.to(x.dtype)  # (w + 1, M)
    h = _states_from_zero(padded.view(batch, blocks, block, size), powers, documents)
    starts = x.new_zeros(batch, 1, size) if start is None else start.unsqueeze(1)
    if blocks > 1:
        ends = h[:, :, -1]
        if documents is not None:  # the first state must outlive the first block's documents; later ones see to it
            goes_on = (documents[:, 0, 0] == documents[:, 0, -1]).view(-1, 1, 1)
            entering = torch.where(goes_on, starts, torch.zeros_like(starts)).squeeze(1)
        else:
            entering = starts.squeeze(1)
        borders = _scan(wide_powers[-1], ends, entering, None if documents is None else documents[..., -1])
        starts = torch.cat([starts, borders[:, :-1]], dim=1)
    elif start is None:
        return h.view(batch, block, size)[:, :length]
    carried = powers[1:] * starts.unsqueeze(2)
    if documents is not None:
        alive = (documents == document_before_block(documents)).unsqueeze(-1)
        carried = torch.where(alive, carried, torch.zeros_like(carried))
    return (h + carried).view(batch, blocks * block, size)[:, :length]


def _states_from_zero(tokens: torch.Tensor, powers: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """States of every block started at zero. tokens (B, n, w, M) -> (B, n, w, M)."""
    batch, blocks, block, size = tokens.shape
    if documents is None and batch * blocks >= block:  # else the matrices would outweigh the tokens
        matrix = causal_toeplitz(powers[:block].mT)  # (M, w, w)
        flat = tokens.permute(3, 0, 1, 2).reshape(size, batch * blocks, block)
        return torch.bmm(flat, matrix).view(size, batch, blocks, block).permute(1, 2, 3, 0)
    half, h = 1, tokens
    while half < block:  # the state at the end of the left half enters the right half if its document continues
        pairs = h.reshape(batch, blocks, block // (2 * half), 2, half, size)
        entering = powers[1 : half + 1] * pairs[..., 0, -1:, :]
        if documents is not None:
            spans = documents.reshape(batch, blocks, block // (2 * half), 2, half)
            same = (spans[..., 1, :] == spans[..., 0, -1:]).unsqueeze(-1)
            entering = torch.where(same, entering, 0.0)
        h = torch.stack([pairs[..., 0, :, :], pairs[..., 1, :, :] + entering], dim=3)
        half *= 2
    return h.reshape(batch, blocks, block, size)


def linear_step_torch(inputs: StepInputs) -> tuple[torch.Tensor | None, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.linear_scan.lti_token`."""
    u, state, decay_minus_one, input_vector, left, right, output_rows, skip, is_complex, silu = inputs
    h, value = state.to(decay_minus_one.dtype), u.to(decay_minus_one.dtype).unsqueeze(-1)
    moved = product_of_pairs(decay_minus_one, h) if is_complex else decay_minus_one * h
    if left is not None and right is not None:
        moved = torch.addcmul(moved, left, torch.linalg.vecdot(right, h).unsqueeze(-1), value=-1)
    after = h + torch.addcmul(moved, input_vector, value)
    state.copy_(after)
    if output_rows is None:
        return None, state
    y = torch.linalg.vecdot(output_rows, after)
    y = y if skip is None else torch.addcmul(y, skip, value.squeeze(-1))
    return (F.silu(y) if silu else y).to(u.dtype).unsqueeze(1), state
