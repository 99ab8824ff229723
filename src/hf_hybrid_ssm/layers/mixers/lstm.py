"""`torch.nn.LSTM` with the interface of the long-range mixers, for ablations."""

from typing import Any, Unpack

import torch
from torch import nn

from hf_hybrid_ssm.layers.mixers.base import FrozenLSTM, Mixer, RowOptions, State
from hf_hybrid_ssm.ops._core.transforms import without_autocast


class LSTM(Mixer):
    """One LSTM layer D -> D; bidirectional: two directions of D / 2, side by side.

    Documents and ragged rows run as rows of their own, so nothing passes between them. State: (h, c), (B, D) each.
    Like every recurrence it computes in the precision of its parameters, whatever autocast says.
    """

    def __init__(self, hidden_size: int, **options: Any):
        super().__init__(hidden_size, **options)
        if self.bidirectional and hidden_size % 2:
            raise ValueError(f"hidden_size must be even for a bidirectional LSTM, got {hidden_size}.")
        kind = FrozenLSTM if self.trainable == "none" else nn.LSTM
        width = hidden_size // 2 if self.bidirectional else hidden_size
        self.rnn = kind(hidden_size, width, batch_first=True, bidirectional=self.bidirectional, **self._factory)

    def init_parameters(self) -> dict[str, torch.Tensor]:
        """torch's: uniform between -1 and 1 over the root of the width."""
        bound = self.rnn.hidden_size**-0.5
        return {
            name: (2 * torch.rand(parameter.shape, dtype=torch.float64) - 1) * bound
            for name, parameter in self.named_parameters()
        }

    def mix(
        self, u: torch.Tensor, initial_state: State | None, **rows: Unpack[RowOptions]
    ) -> tuple[torch.Tensor, State | None]:
        seq_idx, lengths, return_final_state = rows["seq_idx"], rows["lengths"], rows["return_final_state"]
        batch, length, _ = u.shape
        start = None
        if not self.bidirectional:
            start = self._parts(self.init_state(batch, device=u.device) if initial_state is None else initial_state)
        if batch == 0 or length == 0:
            return u, _widened(start) if return_final_state and start is not None else None
        x = u.to(self.rnn.weight_ih_l0.dtype)
        with without_autocast(u.device.type):
            if seq_idx is None and lengths is None:
                y, final = self.rnn(x, None if start is None else tuple(part.unsqueeze(0) for part in start))
                final = tuple(part[0] for part in final)
            else:
                y, final = self._by_document(x, start, seq_idx, lengths)
        return y.to(u.dtype), _widened(final) if return_final_state else None

    def _by_document(
        self,
        x: torch.Tensor,
        start: tuple[torch.Tensor, ...] | None,
        seq_idx: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Every document as a row of a packed sequence."""
        batch, length, _ = x.shape
        place = torch.arange(length, device=x.device)
        real = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        if lengths is not None:
            real = place < lengths.unsqueeze(1)
        first = real & (place == 0)
        if seq_idx is not None:
            first[:, 1:] |= real[:, 1:] & (seq_idx[:, 1:] != seq_idx[:, :-1])
        rows, begins = first.nonzero(as_tuple=True)
        if rows.numel() == 0:
            return torch.zeros_like(x), start or ()
        document = (first.flatten().cumsum(0) - 1).view(batch, length)
        counts = torch.bincount(document[real], minlength=rows.numel())
        index = begins.unsqueeze(1) + torch.arange(int(counts.max()), device=x.device)
        alive = index < (begins + counts).unsqueeze(1)
        documents = x[rows.unsqueeze(1), index.clamp(max=length - 1)]
        packed = nn.utils.rnn.pack_padded_sequence(documents, counts.cpu(), batch_first=True, enforce_sorted=False)
        begin = None
        if start is not None:
            begin = tuple(torch.where((begins == 0).unsqueeze(1), part[rows], 0.0).unsqueeze(0) for part in start)
        out, final = self.rnn(packed, begin)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        y = x.new_zeros(batch, length, self.hidden_size).index_put(
            (rows.unsqueeze(1).expand_as(index)[alive], index[alive]), out[alive]
        )
        if start is None:
            return y, ()
        last = document[:, -1]  # the row's last document: `document` keeps counting through the padding
        empty = (~real[:, 0]).unsqueeze(1)
        return y, tuple(torch.where(empty, old, new[0][last]) for old, new in zip(start, final))

    def _parts(self, state: State) -> tuple[torch.Tensor, ...]:
        return tuple(part.to(self.rnn.weight_ih_l0.dtype) for part in state)

    def step(self, u_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        self._check_step(u_t, state)
        start = tuple(part.unsqueeze(0) for part in self._parts(state))
        with without_autocast(u_t.device.type):
            y, final = self.rnn(u_t.to(self.rnn.weight_ih_l0.dtype).unsqueeze(1), start)
        return y.squeeze(1).to(u_t.dtype), _widened(tuple(part[0] for part in final))

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.hidden_size,), (self.hidden_size,)


def _widened(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """States travel in float32 at least, like those of every mixer."""
    return tuple(part.to(torch.promote_types(part.dtype, torch.float32)) for part in state)
