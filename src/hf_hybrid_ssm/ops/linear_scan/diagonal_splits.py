"""A scan of few numbers over many tokens, cut in time: each row becomes several, so that a card is not idle.

A first pass takes each split from nothing, a scan over the splits says what enters each, and a second pass starts
there. All three are launches of the one kernel; decays do not depend on the tokens, so that a whole split's decay is a
power. The gradient that enters a split at its end is added to that of the split's last token.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_hybrid_ssm.ops.linear_scan.reference import DiagonalInputs

BLOCK = 32  # tokens after which a state is corrected, see `triton_channel_kernels`
LEAST = 256  # tokens of a split
SCHEDULERS = 4  # of a multiprocessor
Run = Callable[..., None]


def diagonal_splits(warps: int, length: int, multiprocessors: int) -> int:
    """In how many splits to cut a row, where all rows together have so many warps.

    The second pass costs as much as the first: a row is cut only into four and more.
    """
    splits = min(2 * multiprocessors * SCHEDULERS // max(1, warps), length // LEAST)
    return splits if splits >= 4 else 1


class Splits:
    """Rows (B, L, ...) cut into S rows of n tokens each, (B S, n, ...); the last is filled up with zeros."""

    def __init__(self, x: Tensor, decay: Tensor, seq_idx: Tensor | None, splits: int):
        self.batch, self.length = x.shape[:2]
        self.size = -(-self.length // (splits * BLOCK)) * BLOCK
        self.count = -(-self.length // self.size)
        self.shape, self.decay, self.seq_idx = x.shape[2:], decay, None
        self.enters = self.intact = None
        if seq_idx is not None:
            padding = self.count * self.size - self.length
            rows = torch.cat([seq_idx, seq_idx[:, -1:].expand(-1, padding)], 1).unflatten(1, (self.count, self.size))
            self.seq_idx = rows.flatten(0, 1).contiguous()
            enters = rows[:, 1:, 0] == rows[:, :-1, -1]
            self.enters = torch.cat([torch.ones_like(enters[:, :1]), enters], 1)  # what came before the split
            self.intact = (rows[..., 1:] == rows[..., :-1]).all(-1)  # no document begins within

    def cut(self, x: Tensor) -> Tensor:
        padding = self.count * self.size - self.length
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding)) if padding else x
        return x.unflatten(1, (self.count, self.size)).flatten(0, 1).contiguous()

    def join(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, self.count)).flatten(1, 2)[:, : self.length].contiguous()

    def entering(self, leaving: Tensor, first: Tensor | None) -> Tensor:
        """What enters each split, (B S, ...), of what leaves each, (B, S, ...), and what enters the first."""
        first = leaving.new_zeros(self.batch, *self.shape) if first is None else first
        return (torch.cat([first[:, None], leaving[:, :-1]], 1) * self.spread(self.enters)).flatten(0, 1)

    def chain(self, run: Run, ends: Tensor, first: Tensor | None, *, backwards: bool) -> Tensor:
        """What leaves each split, (B, S, ...), from what leaves it of nothing: in time, or the gradient's way."""
        whole = torch.view_as_complex(self.decay) if self.decay.dim() == 2 else self.decay
        power = whole**self.size
        power = power.conj().resolve_conj() if backwards else power
        decay = torch.view_as_real(power).contiguous() if self.decay.dim() == 2 else power
        numbers = None
        if self.intact is not None and self.enters is not None:
            keep = self.intact & self.enters  # from one split to the next
            if first is not None:
                first = first * self.spread(self.intact)[:, 0]
            if backwards:
                keep = self.intact & torch.cat([self.enters[:, 1:], self.enters[:, :1]], 1)
                keep = keep.flip(1)
            numbers = (~keep).long().cumsum(1)
        ends = (ends.flip(1) if backwards else ends).contiguous()
        leaving = torch.empty_like(ends)
        run(DiagonalInputs(ends, decay, first, numbers), leaving)
        return leaving.flip(1) if backwards else leaving

    def spread(self, flags: Tensor | None) -> Any:
        """Flags (B, S) for numbers (B, S, ...)."""
        return 1.0 if flags is None else flags.float().reshape(*flags.shape, *(1 for _ in self.shape))


def forward(run: Run, inputs: DiagonalInputs, splits: int) -> Tensor:
    """The states h of all tokens."""
    x, decay, initial_state, seq_idx = inputs
    rows = Splits(x, decay, seq_idx, splits)
    cut = rows.cut(x)
    h = torch.empty_like(cut)
    run(DiagonalInputs(cut, decay, torch.zeros_like(cut[:, 0]), rows.seq_idx), h)
    leaving = rows.chain(run, h[:, -1].unflatten(0, (rows.batch, rows.count)), initial_state, backwards=False)
    run(DiagonalInputs(cut, decay, rows.entering(leaving, initial_state), rows.seq_idx), h)
    return rows.join(h)


def backward(run: Run, dh: Tensor, inputs: DiagonalInputs, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the initial state (B, ...), and of the decay by rows (B S, ...); h is in the place of x."""
    h, decay, initial_state, seq_idx = inputs
    rows = Splits(dh, decay, seq_idx, splits)
    cut, states = rows.cut(dh), rows.cut(h)
    last = states[:, -1].unflatten(0, (rows.batch, rows.count))
    start = rows.entering(last, initial_state)
    dx, final, parts = torch.empty_like(cut), torch.empty_like(start), torch.empty_like(start)
    run(DiagonalInputs(cut, decay, start, rows.seq_idx), dx, states, final, parts)
    given = final.unflatten(0, (rows.batch, rows.count))  # the gradient of what enters, of the split alone
    whole = rows.chain(run, given, None, backwards=True) * rows.spread(rows.enters)
    cut = cut.clone()
    cut[:, -1] += F.pad(whole[:, 1:], (0, 0) * len(rows.shape) + (0, 1)).flatten(0, 1)
    run(DiagonalInputs(cut, decay, start, rows.seq_idx), dx, states, final, parts)
    return rows.join(dx), final.unflatten(0, (rows.batch, rows.count))[:, 0].contiguous(), parts
