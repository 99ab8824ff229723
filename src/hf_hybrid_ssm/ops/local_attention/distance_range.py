"""Which keys a query sees: always an interval of distances d = i - j, cut per token by documents, chunks and
padding."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows

UNLIMITED = 2**40  # a limit of the window that no token reaches

Limits = tuple[int | None, int | None]


@dataclass(frozen=True)
class Window:
    """How many keys before and after itself a query sees, None for all. `of` makes one and checks it; the constructor
    does not. A layer makes its own once; an op also takes the pair."""

    left: int | None
    right: int | None

    @classmethod
    def of(cls, window: "Window | Limits") -> "Window":
        """Of a pair (left, right). Limits that no token reaches become -UNLIMITED or UNLIMITED.

        Raises:
            TypeError: not a pair of whole numbers or None.
            ValueError: left is negative, or the window ends before it begins.
        """
        if isinstance(window, Window):
            return window
        if not isinstance(window, tuple) or len(window) != 2:
            raise TypeError(f"window must be a pair (left, right), got {window!r}.")
        if any(limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)) for limit in window):
            raise TypeError(f"window must hold whole numbers or None, got {window!r}.")
        left, right = window
        if left is not None and (left < 0 or (right is not None and left < -right)):
            raise ValueError(f"window={window}: left must be at least 0, and at least -right.")
        left = left if left is None else min(left, UNLIMITED)
        return cls(left, right if right is None else max(-UNLIMITED, min(right, UNLIMITED)))

    @property
    def limits(self) -> Limits:
        """(left, right)."""
        return self.left, self.right

    @property
    def looks_ahead(self) -> bool:
        """Whether a query sees keys after itself."""
        return self.right is None or self.right > 0

    def within_chunk(self, size: int) -> "Window":
        """What a chunk leaves of it; if it leaves nothing, the key at -right alone, which no token then sees."""
        left, right = (size - 1 if limit is None else min(limit, size - 1) for limit in self.limits)
        return Window(max(left, -right), right)


class AttentionState(NamedTuple):
    """What later tokens need of the earlier ones.

    Args:
        keys: (B, G, P, E), the last P keys, newest last. In a static cache, where they stay in their places
            (`in_order`): token i of the row's last document in slot i mod P.
        values: (B, G, P, V).
        seen: (B,) int64, tokens so far of the row's last document; min(seen, P) of the keys are its own, the rest of
            the slots hold anything.
    """

    keys: torch.Tensor
    values: torch.Tensor
    seen: torch.Tensor


class DistanceRange(NamedTuple):
    """Per token, the distances it may see: first ≤ d ≤ last, and its rank in its document; each (B or 1, L) int64."""

    first: torch.Tensor
    last: torch.Tensor
    rank: torch.Tensor


def distance_ranges(
    length: int,
    window: Limits,
    chunk_size: int | None,
    *,
    seen: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
    device: torch.device,
) -> DistanceRange:
    """The interval of each token. Counting a token's rank within its document makes one comparison serve the start of
    the row, the empty slots of a cache, the borders of documents, and the grid of chunks."""
    left, right = window
    position = torch.arange(length, device=device).unsqueeze(0)
    is_start = None if seq_idx is None else _is_start(seq_idx)
    rank, end = _ranks(position, seen, is_start), None
    if is_start is not None:
        later_start = torch.where(is_start, position, length).flip(1).cummin(1).values.flip(1)  # at or after i
        end = torch.cat([later_start[:, 1:], torch.full_like(later_start[:, :1], length)], 1)
    last = rank if left is None else rank.clamp(max=left)
    if right is not None and right <= 0:
        first = torch.full_like(position, -right)
    else:
        stop = torch.full_like(position, length) if end is None else end
        if lengths is not None:
            stop = torch.minimum(stop, lengths.unsqueeze(1))
        first = (position + 1 - stop).clamp(max=0)  # minus the tokens that follow in the document
        first = first if right is None else first.clamp(min=-right)
    if chunk_size is not None:
        offset = rank % chunk_size
        first, last = torch.maximum(first, offset + 1 - chunk_size), torch.minimum(last, offset)
    return DistanceRange(first, last, rank)


def document_ranks(
    length: int, *, seen: torch.Tensor | None, seq_idx: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """(B or 1, L) int64, how many tokens of its document come before each of the L tokens.

    Args:
        length: L.
        seen: (B,), tokens that the row's first document had before; or None.
        seq_idx: (B, L), documents of packed rows; or None.
    """
    if length == 1 and seen is not None:
        return seen.unsqueeze(1).clone()  # a decoded token advances it in place
    position = torch.arange(length, device=device).unsqueeze(0)
    return _ranks(position, seen, None if seq_idx is None else _is_start(seq_idx))


def _ranks(position: torch.Tensor, seen: torch.Tensor | None, is_start: torch.Tensor | None) -> torch.Tensor:
    rank = position if seen is None else position + seen.unsqueeze(1)
    if is_start is None:
        return rank
    start = torch.where(is_start, position, 0).cummax(1).values
    return torch.where(start == 0, rank, position - start)


def _is_start(seq_idx: torch.Tensor) -> torch.Tensor:
    is_start = torch.ones_like(seq_idx, dtype=torch.bool)
    is_start[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return is_start


def bias_by_distance(bias: torch.Tensor, distance: torch.Tensor, two_sided: bool) -> torch.Tensor:
    """(H, ...) the bias of each distance; distances beyond the table take its last (two-sided: outermost) value."""
    column = distance + bias.shape[1] // 2 if two_sided else distance
    return bias[:, column.clamp(0, bias.shape[1] - 1)]


def zero_key_logits(
    bias: torch.Tensor | None, rank: torch.Tensor, left: int, right: int, like: torch.Tensor
) -> torch.Tensor:
    """Log of the summed weights of the zero keys before the document's start, (B or 1, H or 1, L).

    A token of rank p misses the distances p+1 … left; each holds a zero key, of logit bias(d) alone.
    """
    distance = torch.arange(-right, left + 1, device=rank.device)
    logits = (
        like.new_zeros(1, len(distance)) if bias is None else bias_by_distance(bias, distance, False).to(like.dtype)
    )
    missing = logits.flip(1).logcumsumexp(1).flip(1)  # column c: distances c - right … left
    missing = torch.cat([missing, torch.full_like(missing[:, :1], float("-inf"))], 1)
    column = (rank + 1 + right).clamp(0, len(distance))
    return missing[:, column].transpose(0, 1)


def append_to_window(
    state: AttentionState | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    left: int | None,
    rows: Rows = PLAIN_ROWS,
) -> AttentionState:
    """The state after these keys and values (B, G, L, ...): the last `left` of [state ; keys]; if None all, or in a
    static cache as many as it has room for.

    What `local_attention` returns as its final state, without the attention.
    """
    if rows.capacity is None:
        return _append(state, keys, values, left, rows)
    before = None if state is None else newest_last(state)
    return in_order(_append(before, keys, values, rows.capacity if left is None else left, rows))


def newest_last(state: AttentionState) -> AttentionState:
    """The state of a static cache as every other state is."""
    return state._replace(keys=rolled(state.keys, -state.seen), values=rolled(state.values, -state.seen))


def in_order(state: AttentionState) -> AttentionState:
    """A state whose newest are last as that of a static cache."""
    return state._replace(keys=rolled(state.keys, state.seen), values=rolled(state.values, state.seen))


def rolled(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """x (B, H, P, e) rolled by shift (B,) places along P."""
    slots = x.shape[2]
    ahead = slots - torch.fmod(shift, slots).unsqueeze(1)  # positive: ExecuTorch has the remainder of C
    source = (torch.arange(slots, device=x.device) + ahead) % slots
    return x.gather(2, source[:, None, :, None].expand_as(x))


def _append(
    state: AttentionState | None, keys: torch.Tensor, values: torch.Tensor, capacity: int | None, rows: Rows
) -> AttentionState:
    """`append_to_window` of states whose newest are last."""
    batch, _, length, _ = keys.shape
    seq_idx, lengths = rows.seq_idx, rows.lengths
    held = 0 if state is None else state.keys.shape[2]
    capacity = held + length if capacity is None else capacity
    count = keys.new_full((batch,), length, dtype=torch.int64) if lengths is None else lengths.long()
    seen = count if state is None else count + state.seen
    if seq_idx is not None and length > 0:
        last_column = (count - 1).clamp(min=0).unsqueeze(1)
        last = seq_idx.gather(1, last_column)
        column = torch.arange(length, device=keys.device)
        in_last = ((seq_idx == last) & (column < count.unsqueeze(1))).sum(1)
        seen = torch.where(last.squeeze(1) == seq_idx[:, 0], seen, in_last)

    def newest(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        joined = new if old is None else torch.cat([old.to(new.dtype), new], 2)
        total = joined.shape[2]
        if total < capacity:
            joined = torch.nn.functional.pad(joined, (0, 0, capacity - total, 0))
            total = capacity
        if lengths is None:
            return joined[:, :, total - capacity :]
        column = total - length - capacity + count.unsqueeze(1) + torch.arange(capacity, device=new.device)
        column = column[:, None, :, None]
        kept = joined.gather(2, column.clamp(min=0).expand(-1, joined.shape[1], -1, joined.shape[3]))
        return torch.where(column >= 0, kept, 0.0)  # before the first token: column 0 may be padding, and NaN

    old_keys, old_values = (None, None) if state is None else (state.keys, state.values)
    return AttentionState(newest(old_keys, keys), newest(old_values, values), seen)
