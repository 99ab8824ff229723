"""`torch.nn.LSTM` with the interface of the long-range mixers, for ablations."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hf_hybrid_ssm.layers.mixers.base import FrozenMixin, Mixer, MixerState
from hf_hybrid_ssm.ops.core.packed_sequences import packed_sequences
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast


class ParametrizableLSTM(nn.LSTM):
    """`nn.LSTM` that reads its parameters by name where one is parametrized; torch's own reads a list that
    `torch.nn.utils.parametrize` does not change."""

    def forward(self, *args: Any) -> Any:
        if not is_parametrized(self):
            return nn.LSTM.forward(self, *args)  # super() cannot be traced with torch 2.15
        plain: Any = self._flat_weights
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return nn.LSTM.forward(self, *args)  # super() cannot be traced with torch 2.15
        finally:
            self._flat_weights = plain


class FrozenLSTM(FrozenMixin, ParametrizableLSTM):
    """`ParametrizableLSTM` whose parameters do not train."""


class LSTM(Mixer):
    """One LSTM layer D -> D; bidirectional: two directions of D / 2, side by side.

    Documents and ragged rows run as rows of their own, so nothing passes between them. State: (h, c), (B, D) each.
    Like every recurrence it computes in the precision of its parameters, also under autocast.
    """

    init_reads_values: ClassVar[bool] = False

    def __init__(self, hidden_size: int, **options: Any):
        super().__init__(hidden_size, **options)
        if self.bidirectional and hidden_size % 2:
            raise ValueError(f"hidden_size must be even for a bidirectional LSTM, got {hidden_size}.")
        kind = FrozenLSTM if self.trainable == "none" else ParametrizableLSTM
        width = hidden_size // 2 if self.bidirectional else hidden_size
        self.rnn = kind(hidden_size, width, batch_first=True, bidirectional=self.bidirectional, **self._factory)

    def init_parameters(self) -> dict[str, torch.Tensor]:
        """As in torch: uniform between -1/sqrt(D) and 1/sqrt(D), with D the width of a direction."""
        bound = self.rnn.hidden_size**-0.5
        return {
            name: (2 * torch.rand(parameter.shape, dtype=torch.float64) - 1) * bound
            for name, parameter in self.named_parameters()
        }

    def forward_rows(
        self, u: torch.Tensor, initial_state: MixerState | None, rows: Rows
    ) -> tuple[torch.Tensor, MixerState | None]:
        lengths, state, documents = rows.lengths, None, None
        dtype = next(self.parameters()).dtype
        if not self.bidirectional:
            start = self.init_state(u.shape[0], device=u.device) if initial_state is None else initial_state
            state = tuple(part.to(dtype) for part in start)
        if 0 in u.shape[:2]:
            return u, _widened(state) if rows.return_final_state and state is not None else None
        x = u.to(dtype)
        if rows.documents is not None:
            documents = packed_sequences(rows.documents.seq_idx, lengths)
            x, lengths = documents.unpack(x), documents.lengths
            state = None if state is None else tuple(documents.unpack_state(part) for part in state)
        with without_autocast(u.device.type):
            y, final = self._run(x, state, lengths)
        if documents is not None:
            y, final = documents.pack(y), tuple(part[documents.last] for part in final)
        return y.to(u.dtype), _widened(final) if rows.return_final_state else None

    def _run(
        self, x: torch.Tensor, state: tuple[torch.Tensor, ...] | None, lengths: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Sequences of one document each; one without tokens keeps its state."""
        start = None if state is None else tuple(part.unsqueeze(0) for part in state)
        if lengths is None:
            y, final = self.rnn(x, start)
        else:  # a packed sequence has no empty rows: they read one zero
            sizes = lengths.clamp(min=1).cpu()
            x = zero_beyond(x, lengths)
            packed = nn.utils.rnn.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
            y, final = self.rnn(packed, start)
            y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        if state is None:
            return y, ()
        final = tuple(part[0] for part in final)
        if lengths is not None:
            empty = (lengths == 0).unsqueeze(1)
            final = tuple(torch.where(empty, old, new) for old, new in zip(state, final))
        return y, final

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.hidden_size,), (self.hidden_size,)


def _widened(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """States are returned in float32 or wider, like those of every mixer."""
    return tuple(part.to(torch.promote_types(part.dtype, torch.float32)) for part in state)
