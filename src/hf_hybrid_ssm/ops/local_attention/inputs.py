"""What implementations of local attention and of its step take, checked, and what they ask of it."""

from typing import Any, NamedTuple

import torch

from hf_hybrid_ssm.ops.local_attention.distance_range import (
    AttentionState,
    DistanceRange,
    bias_by_distance,
    distance_ranges,
    zero_key_logits,
)
from hf_hybrid_ssm.ops.local_attention.sink import Sink

LAYOUTS = ("free", "by_rank", "block")
"""Where a token finds the keys before it, in the order of their numbers in C: see `slot_attention`."""


class AttentionInputs(NamedTuple):
    """Of whole rows, as `local_attention` has them; `state` has the keys that the window needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: Any  # `Limits`; a type checker would ask for numbers wherever the window is known to have them
    scale: float
    bias: torch.Tensor | None = None
    sink_logits: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    chunk_size: int | None = None
    zero_kv_sink: bool = False
    dropout: float = 0.0
    softcap: float | None = None
    state: AttentionState | None = None
    seq_idx: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.q.shape[2]

    @property
    def is_new(self) -> bool:
        """Every row is one document from its first token."""
        return self.state is None and self.seq_idx is None

    @property
    def is_plain(self) -> bool:
        """And all that differs between tokens is where they lie."""
        return self.is_new and self.lengths is None and self.sink_logits is None and not self.zero_kv_sink

    @property
    def is_causal_by_chunk(self) -> bool:
        """Causal attention within chunks, for which torch has a kernel."""
        chunk, by_distance = self.chunk_size, self.bias is not None or self.sink_logits is not None
        special = by_distance or self.dropout or self.softcap is not None
        return self.is_new and not special and chunk is not None and self.window == (chunk - 1, 0)

    @property
    def two_sided(self) -> bool:
        return self.window[1] is None or self.window[1] > 0

    def ranges(self) -> DistanceRange:
        seen = None if self.state is None else self.state.seen
        documents: dict[str, Any] = {"seq_idx": self.seq_idx, "lengths": self.lengths, "device": self.q.device}
        return distance_ranges(self.length, self.window, self.chunk_size, seen=seen, **documents)

    def sink(self, ranges: DistanceRange) -> Sink | None:
        if self.zero_kv_sink:
            left, right = self.window
            return Sink(zero_key_logits(self.bias, ranges.rank, left, right, self.q.new_empty(0)), None, True)
        if self.sink_logits is None:
            return None
        return Sink(self.sink_logits.to(self.q.dtype), self.sink_values, False)

    def bias_at(self, distance: torch.Tensor) -> torch.Tensor | None:
        """(1, H, Q, K) of distances (Q, K)."""
        return None if self.bias is None else bias_by_distance(self.bias, distance, self.two_sided).unsqueeze(0)


class StepInputs(NamedTuple):
    """Of one token of each row, as `slot_attention` has them."""

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor | None
    bias: torch.Tensor | None
    head_scale: torch.Tensor | None
    sink_logits: torch.Tensor | None
    sink_values: torch.Tensor | None
    window: Any
    chunk_size: int | None
    layout: str
    scale: float
    zero_kv_sink: bool
    mask: torch.Tensor | None
