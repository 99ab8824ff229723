"""Attention within a window or a chunk, linear in the length of the sequence."""

import math

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.l2_normalise import l2_normalise
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows, is_one_token
from hf_hybrid_ssm.ops.local_attention.distance_range import (
    AttentionState,
    Limits,
    Window,
    append_to_window,
    document_ranks,
    in_order,
    newest_last,
    rolled,
)
from hf_hybrid_ssm.ops.local_attention.inputs import AttentionInputs
from hf_hybrid_ssm.ops.local_attention.reference import EXAMPLES, local_attention_reference
from hf_hybrid_ssm.ops.local_attention.sink import check_sink
from hf_hybrid_ssm.ops.local_attention.slots import (
    append_slot,
    check_seen,
    drop_oldest,
    has_step_kernel,
    slot_attention,
    window_token,
)
from hf_hybrid_ssm.ops.local_attention.torch_backend import local_attention_torch

_OP = Op(
    "local_attention",
    builtin={"torch": local_attention_torch, "reference": local_attention_reference},
    kernels={
        "triton": "hf_hybrid_ssm.ops.local_attention.flex_attention",
        "native": "hf_hybrid_ssm.ops.local_attention.native",
    },
    examples=EXAMPLES,
)


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: Window | Limits,
    chunk_size: int | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    head_scale: torch.Tensor | None = None,
    zero_kv_sink: bool = False,
    sink_logits: torch.Tensor | None = None,
    sink_values: torch.Tensor | None = None,
    dropout: float = 0.0,
    rows: Rows = PLAIN_ROWS,
    initial_state: AttentionState | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, AttentionState | None]:
    r"""y_i = Σ_j softmax_j( scale · q_i·k_j + bias(i - j) ) v_j over the keys with i - left ≤ j ≤ i + right.

    Token i sees token j if j lies in its window, both are real tokens of the same document, and, with `chunk_size` C,
    floor(i/C) = floor(j/C) counted from the document's start. A sink is one more column of the softmax, of logit
    sink_logits_i and value sink_values. A token that sees neither a key nor a sink gets 0.

    Args:
        q, k, v: (B, H, L, E), (B, G, L, E), (B, G, L, V), one dtype; H / G heads in a row share keys and values.
        window: (left, right), the number of keys before and after the query that it sees, as in flash-attention but
            with None for "all". right = 0 is causal, right = -1 causal without the token itself. transformers'
            `sliding_window=W` is (W - 1, 0). With left = None time and memory are quadratic.
        chunk_size: C.
        bias: (H, R), added to the logits. Causal: column c belongs to distance c. Two-sided: R is odd, the middle
            column is distance 0, columns right of it look back. Distances beyond the table take its outermost value.
        scale: of q·k; E**-0.5 by default.
        softcap: c > 0: instead of a = scale · q·k the logits have c tanh(a / c), as in Gemma 2, by torch's products.
        head_scale: (H,): first q and k are L2-normalised (x / sqrt(x·x + 1e-6)); q and bias are multiplied by its
            absolute value.
        zero_kv_sink: the distances that reach before the document's start hold keys and values that are 0
            (they take a share of the softmax); otherwise they hold nothing. Causal windows only.
        sink_logits: (B, H, L), the logit of the sink for each token; -inf where it has none. `head_scale` does not
            change it.
        sink_values: (H, V), or (G, V) for heads that share keys and values; 0 by default (a scalar sink).
        dropout: on the softmax.
        rows: how the rows are read. The final state holds the keys that the window needs; with left = None all of
            them, or as many as `rows.capacity`.
        initial_state: what an earlier call returned: its keys come before the row's first token, as part of the row's
            first document.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, H, L, V) in the dtype of q, and the final state or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or options that contradict each
            other.
    """
    window = Window.of(window)
    if is_one_token(rows, q.shape[-2], initial_state) and dropout == 0 and softcap is None:
        if chunk_size is not None:
            window = window.within_chunk(chunk_size)
        assert initial_state is not None
        y, after = window_token(
            q, k, v, initial_state, rows, window=window, chunk_size=chunk_size, bias=bias, scale=scale,
            head_scale=head_scale, zero_kv_sink=zero_kv_sink, sink_logits=sink_logits, sink_values=sink_values,
            backend=backend,
        )  # fmt: skip
        return y, after if rows.return_final_state else None
    check_tensor("q", q, (None, None, None, None), "B, H, L, E")
    batch, heads, length, size = q.shape
    check_tensor("k", k, (batch, None, length, size), "B, G, L, E", like=q)
    check_tensor("v", v, (batch, k.shape[1], length, None), "B, G, L, V", like=q)
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {heads}.")
    seq_idx, lengths = checked_rows(rows, batch, length)
    _check_options(window, chunk_size, zero_kv_sink)
    check_sink(sink_logits, sink_values, q, v, zero_kv_sink)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap} must be positive and finite, or None.")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout} must lie in [0, 1).")
    bias_is_two_sided = window.looks_ahead
    if chunk_size is not None:
        window = window.within_chunk(chunk_size)
    left, two_sided = window.left, window.looks_ahead
    check_tensor("bias", bias, (heads, None), "H, R", beside=q, optional=True)
    if bias is not None and bias.shape[1] == 0:
        raise ValueError("bias (H, R) must have a column for at least one distance, got R = 0.")
    if bias is not None and bias_is_two_sided and bias.shape[1] % 2 == 0:
        raise ValueError(f"bias of two-sided attention must have an odd number of distances, got {bias.shape[1]}.")
    if bias is not None and bias_is_two_sided and not two_sided:  # chunks of one token leave nothing to look ahead at
        bias = bias[:, bias.shape[1] // 2 :]
    if two_sided and (initial_state is not None or rows.return_final_state):
        raise ValueError(
            f"window={window.limits} looks ahead: such attention has no state to start from or to return."
        )
    if head_scale is not None:
        check_tensor("head_scale", head_scale, (heads,), "H", beside=q)
        factor = head_scale.abs().to(q.dtype).unsqueeze(1)
        q, k, bias = l2_normalise(q) * factor.unsqueeze(1), l2_normalise(k), None if bias is None else bias * factor
    given = initial_state
    if given is not None:
        initial_state = _check_state(given, k, v, left, rows.capacity is not None)
    scale = size**-0.5 if scale is None else scale
    inputs = AttentionInputs(
        q, k, v, window.limits, scale, bias, sink_logits, sink_values, chunk_size, zero_kv_sink, dropout, softcap,
        initial_state, seq_idx, lengths,
    )  # fmt: skip
    y = _OP.select(q.device.type, q.dtype, backend)(inputs)
    if not rows.return_final_state:
        return y, None
    return y, append_to_window(given, k, v, left, rows)


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
    """The state before the first token, of `capacity` slots (the window's left, or `chunk_size` - 1)."""
    keys = torch.zeros(batch, heads, capacity, head_dim, device=device, dtype=dtype)
    values = keys if value_dim is None else torch.zeros(batch, heads, capacity, value_dim, device=device, dtype=dtype)
    return AttentionState(keys, values.clone(), torch.zeros(batch, dtype=torch.int64, device=device))


def _check_options(window: Window, chunk_size: int | None, zero_kv_sink: bool) -> None:
    left, right = window.limits
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    if zero_kv_sink and (right is None or right > 0 or left is None or chunk_size is not None):
        raise ValueError(
            "zero_kv_sink needs a causal window, (left, right) with a finite left and right ≤ 0, and no chunk_size; "
            f"got window={window.limits}, chunk_size={chunk_size}."
        )


def _check_state(
    state: AttentionState, k: torch.Tensor, v: torch.Tensor, needed: int | None, is_static: bool
) -> AttentionState:
    """The state with exactly the keys that the window needs, newest last."""
    batch, heads, _, size = k.shape
    check_tensor("initial_state.keys", state.keys, (batch, heads, None, size), "B, G, P, E", beside=k)
    slots = state.keys.shape[2]
    check_tensor("initial_state.values", state.values, (batch, heads, slots, v.shape[3]), "B, G, P, V", beside=k)
    check_seen("initial_state.seen", state.seen, batch)
    state = newest_last(state) if is_static else state
    if needed is None or slots == needed:
        return state
    if slots < needed:
        raise ValueError(f"initial_state holds {slots} keys, but the window needs the last {needed}.")
    return AttentionState(state.keys[:, :, slots - needed :], state.values[:, :, slots - needed :], state.seen)


__all__ = [
    "AttentionState",
    "Limits",
    "Window",
    "append_slot",
    "append_to_window",
    "document_ranks",
    "drop_oldest",
    "empty_state",
    "has_step_kernel",
    "in_order",
    "local_attention",
    "newest_last",
    "rolled",
    "slot_attention",
    "window_token",
]
