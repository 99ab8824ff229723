"""Attention within a window or a chunk, linear in the length of the sequence."""

import torch

from hf_hybrid_ssm.ops._core.checks import check_seq_idx, check_tensor
from hf_hybrid_ssm.ops._core.dispatch import Op
from hf_hybrid_ssm.ops._core.lengths import check_lengths
from hf_hybrid_ssm.ops.local_attention import reference, torch_backend
from hf_hybrid_ssm.ops.local_attention.distance_range import AttentionState, push

_OP = Op("local_attention", builtin={"torch": torch_backend.run, "reference": reference.run})


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    nearest: int | None,
    farthest: int | None,
    chunk_size: int | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    zero_kv_sink: bool = False,
    dropout: float = 0.0,
    initial_state: AttentionState | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    capacity: int | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, AttentionState | None]:
    r"""y_i = Σ_j softmax_j( scale · q_i·k_j + bias(i - j) ) v_j over the keys with nearest ≤ i - j ≤ farthest.

    Token i sees token j if their distance d = i - j lies within [nearest, farthest], both are real tokens of the same
    document, and, with `chunk_size` C, floor(i/C) = floor(j/C) counted from the document's start. A token that sees no
    key gets 0. In transformers' terms a causal `sliding_window=W` is `nearest=0, farthest=W-1`.

    Args:
        q, k, v: (B, H, L, E), (B, G, L, E), (B, G, L, V), one dtype; H / G heads in a row share keys and values.
        nearest: 0 causal with the token itself, 1 causal without it, -r two-sided, None all later tokens.
        farthest: how far back a token sees; None for all earlier tokens (then time and memory are quadratic).
        chunk_size: C.
        bias: (H, R), added to the logits. Causal: column c belongs to distance c. Two-sided: R is odd, the middle
            column is distance 0, columns right of it look back. Distances beyond the table take its outermost value.
        scale: of q·k; E**-0.5 by default.
        zero_kv_sink: the distances that reach before the document's start hold keys and values that are 0
            (they take a share of the softmax); otherwise they hold nothing. Causal windows only.
        dropout: on the softmax.
        initial_state: what an earlier call returned: its keys come before the row's first token, as part of the row's
            first document.
        seq_idx: (B, L) int, documents of a packed row.
        lengths: (B,) int, real tokens at the front of each row; outputs behind them mean nothing but are finite, and
            the final state is the one after them.
        return_final_state: also return what the next tokens need.
        capacity: number of keys the final state holds, at least what the window needs (the default); with unlimited
            reach the default is to hold all.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, H, L, V) in the dtype of q, and the final state or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or options that contradict each
            other.
    """
    check_tensor("q", q, (None, None, None, None), "B, H, L, E")
    batch, heads, length, size = q.shape
    check_tensor("k", k, (batch, None, length, size), "B, G, L, E", like=q)
    check_tensor("v", v, (batch, k.shape[1], length, None), "B, G, L, V", like=q)
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {heads}.")
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    _check_reach(nearest, farthest, chunk_size, zero_kv_sink)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must lie in [0, 1).")
    if chunk_size is not None:
        nearest, farthest = _within_chunk(nearest, farthest, chunk_size)
    needed = farthest  # the number of earlier keys
    two_sided = nearest is None or nearest < 0
    check_tensor("bias", bias, (heads, None), "H, R", optional=True)
    if bias is not None and two_sided and bias.shape[1] % 2 == 0:
        raise ValueError(f"bias of two-sided attention must have an odd number of distances, got {bias.shape[1]}.")
    if two_sided and (initial_state is not None or return_final_state):
        raise ValueError(f"nearest={nearest} looks ahead: such attention has no state to start from or to return.")
    if capacity is not None and needed is not None and capacity < needed:
        raise ValueError(f"capacity={capacity} is too small: the window needs the last {needed} keys.")
    capacity = capacity if capacity is not None else needed
    if initial_state is not None:
        initial_state = _check_state(initial_state, k, v, needed)
    if two_sided or not return_final_state:
        capacity = 0  # nothing is kept, so nothing is copied
    run = _OP.select(q.device.type, q.dtype, backend)
    y, final_state = run(
        q,
        k,
        v,
        nearest=nearest,
        farthest=farthest,
        chunk_size=chunk_size,
        bias=bias,
        scale=size**-0.5 if scale is None else scale,
        zero_keys=zero_kv_sink,
        dropout=dropout,
        state=initial_state,
        seq_idx=seq_idx,
        lengths=lengths,
        capacity=capacity,
    )
    return y, final_state if return_final_state else None


def empty_state(
    batch: int,
    heads: int,
    capacity: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionState:
    """The state before the first token, of `capacity` slots (`farthest`, or `chunk_size` - 1)."""
    keys = torch.zeros(batch, heads, capacity, head_dim, device=device, dtype=dtype)
    values = keys if value_dim is None else torch.zeros(batch, heads, capacity, value_dim, device=device, dtype=dtype)
    return AttentionState(keys, values.clone(), torch.zeros(batch, dtype=torch.int64, device=device))


def _check_reach(nearest: int | None, farthest: int | None, chunk_size: int | None, zero_keys: bool) -> None:
    if farthest is not None and farthest < max(nearest if nearest is not None else 0, 0):
        raise ValueError(f"farthest={farthest} must be at least nearest={nearest}, and 0.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    if zero_keys and (nearest is None or nearest < 0 or farthest is None or chunk_size is not None):
        raise ValueError(
            "zero_kv_sink needs a causal window: nearest ≥ 0, a finite farthest and no chunk_size; got "
            f"nearest={nearest}, farthest={farthest}, chunk_size={chunk_size}."
        )


def _within_chunk(nearest: int | None, farthest: int | None, chunk_size: int) -> tuple[int, int]:
    """The distances that a chunk leaves; if it leaves none, `nearest` alone, which no token then sees."""
    limit = chunk_size - 1
    nearest = -limit if nearest is None else max(nearest, -limit)
    return nearest, max(nearest, limit if farthest is None else min(farthest, limit))


def _check_state(state: AttentionState, k: torch.Tensor, v: torch.Tensor, needed: int | None) -> AttentionState:
    """The state with exactly the keys that the window needs."""
    batch, heads, _, size = k.shape
    check_tensor("initial_state.keys", state.keys, (batch, heads, None, size), "B, G, P, E")
    held = state.keys.shape[2]
    check_tensor("initial_state.values", state.values, (batch, heads, held, v.shape[3]), "B, G, P, V")
    check_tensor("initial_state.seen", state.seen, (batch,), "B")
    if needed is None or held == needed:
        return state
    if held < needed:
        raise ValueError(f"initial_state holds {held} keys, but the window needs the last {needed}.")
    return AttentionState(state.keys[:, :, held - needed :], state.values[:, :, held - needed :], state.seen)


__all__ = ["AttentionState", "empty_state", "local_attention", "push"]
