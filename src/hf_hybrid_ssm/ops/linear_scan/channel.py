r"""One small linear system per channel, read out without ever storing its states: S4, S4D, EMA.

    s_t = A s_{t-1} + B u_t,    y_t = C s_t + D u_t        for each filter f and channel c on its own

The states of every token would be L times N numbers per channel. A row is cut into blocks of w tokens instead: the
kernel K_j = C A^j B acts inside a block as a Toeplitz matrix, A^{w-1-p} B takes its tokens into the state at its end,
C A^{p+1} reads the state at its start. Only the state at block borders exists, and it is what makes pieces,
documents, ragged rows and one-token steps one and the same computation.
"""

from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops._core.autocast import without_autocast
from hf_hybrid_ssm.ops._core.checks import check_seq_idx, check_tensor
from hf_hybrid_ssm.ops._core.dispatch import Op
from hf_hybrid_ssm.ops._core.lengths import check_lengths, zero_beyond
from hf_hybrid_ssm.ops._core.output_positions import check_output_positions, take_outputs
from hf_hybrid_ssm.ops._core.toeplitz import causal_toeplitz
from hf_hybrid_ssm.ops.linear_scan.reference import channel_scan_reference
from hf_hybrid_ssm.ops.linear_scan.torch_backend import channel_scan_torch
from hf_hybrid_ssm.ops.linear_scan.transition import Transition

_OP = Op("channel_scan", builtin={"torch": channel_scan_torch, "reference": channel_scan_reference})


class ChannelSystem(NamedTuple):
    """The matrices of a block of w tokens, all real, of F filters for each of D channels (see `prepare_system`)."""

    powers: tuple[Transition, ...]  # A^1, A^2, A^4, ..., A^w
    krylov: torch.Tensor  # (F, D, w, N): A^j B
    output: torch.Tensor  # (F, D, N): C
    kernel: torch.Tensor  # (F, D, w): C A^j B
    state_to_output: torch.Tensor  # (F, D, w, N): C A^{j+1}
    input_to_state: torch.Tensor  # (D, w, F N): A^{w-1-p} B, token p of a block into the state at its end
    intra_block: torch.Tensor  # (D, w, F w): the kernel as a Toeplitz matrix, token p of a block to its outputs

    @property
    def block(self) -> int:
        """w, a power of two."""
        return self.kernel.shape[-1]


def prepare_powers(transition: Transition, block: int) -> tuple[Transition, ...]:
    """A^1, A^2, A^4, ..., A^block by repeated squaring; `block` is a power of two."""
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}.")
    powers = [transition]
    while 1 << (len(powers) - 1) < block:
        powers.append(powers[-1].squared())
    return tuple(powers)


def krylov_vectors(powers: tuple[Transition, ...], first: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """(F, D, w, N): first, A first, ..., A^{w-1} first, doubling from the powers (A^T with `transposed`)."""
    rows = first.unsqueeze(-2)
    for power in powers[:-1]:
        rows = torch.cat([rows, power.apply(rows, transposed=transposed)], dim=-2)
    return rows


def prepare_system(powers: tuple[Transition, ...], krylov: torch.Tensor, output: torch.Tensor) -> ChannelSystem:
    """The block matrices, from `prepare_powers`, `krylov_vectors(powers, B)` and the output row C (F, D, N)."""
    kernel = torch.matmul(krylov, output.unsqueeze(-1)).squeeze(-1)
    shifted = powers[0].apply(output.unsqueeze(-2), transposed=True).squeeze(-2)
    state_to_output = krylov_vectors(powers, shifted, transposed=True)
    input_to_state = krylov.flip(-2).permute(1, 2, 0, 3).flatten(2).contiguous()
    intra_block = causal_toeplitz(kernel).permute(1, 2, 0, 3).flatten(2).contiguous()
    return ChannelSystem(powers, krylov, output, kernel, state_to_output, input_to_state, intra_block)


def channel_scan(
    u: torch.Tensor,
    system: ChannelSystem,
    *,
    skip: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    stride: int | None = None,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Run the systems over a batch of sequences.

    Args:
        u: (B, L, D), any floating dtype; computed in the dtype of `system` (float32 or float64).
        system: from `prepare_system`, F filters on each of the D channels, N real state dimensions each.
        skip: (F, D), the D term; None leaves it out.
        initial_state: (B, F, D, N) the state before the first token (zeros when None), of the row's first document.
        seq_idx: (B, L) int, documents of a packed row; the state starts at zero where it changes.
        lengths: (B,) int, number of real tokens at the front of each row.
        return_final_state: also return the state after each row's last real token.
        stride: give y only at the tokens stride - 1, 2 stride - 1, ... (cheap when it is a multiple of the block).
        positions: (B, J) int64, give y only at these tokens of each row (0..L-1).

    Returns:
        y (B, L, F, D), or (B, L // stride, F, D), or (B, J, F, D), in u's dtype; the final state (B, F, D, N) or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    filters, channels, size = system.output.shape
    check_tensor("u", u, (None, None, channels), "B, L, D")
    batch, length, _ = u.shape
    check_tensor("initial_state", initial_state, (batch, filters, channels, size), "B, F, D, N", optional=True)
    check_tensor("skip", skip, (filters, channels), "F, D", optional=True)
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    check_output_positions(stride, positions, batch, length)
    dtype = system.output.dtype
    run = _OP.select(u.device.type, u.dtype, backend)
    with without_autocast(u.device.type):
        x = zero_beyond(u.to(dtype), lengths)
        if initial_state is None:
            initial_state = x.new_zeros(batch, filters, channels, size)
        y, state = run(x, system, initial_state.to(dtype), seq_idx, lengths, return_final_state, stride, positions)
        if skip is not None:
            y = y + skip.to(dtype) * take_outputs(x, stride, positions).unsqueeze(2)
    return y.to(u.dtype), state


def long_kernel(system: ChannelSystem, length: int, strides: tuple[Transition, ...] | None = None) -> torch.Tensor:
    """K_0 .. K_{length-1}, (F, D, length): one product of the rows C A^{iw} with the block's vectors A^j B.

    `strides`: A^w, A^{2w}, A^{4w}, ... if they are known already.
    """
    if length <= system.block:
        return system.kernel[..., :length]
    if strides is None:
        strides = prepare_powers(system.powers[-1], 1 << (-(-length // system.block) - 1).bit_length())
    rows = krylov_vectors(strides, system.output, transposed=True)  # (F, D, steps, N)
    return torch.matmul(rows, system.krylov.mT).flatten(-2)[..., :length]
