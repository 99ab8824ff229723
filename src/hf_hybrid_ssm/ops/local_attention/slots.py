"""Attention of one token to held keys and values, in decoding: what is held is overwritten, nothing has a gradient."""

from typing import Any

import torch

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_overwritten, check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention.distance_range import AttentionState, Limits, Window
from hf_hybrid_ssm.ops.local_attention.inputs import LAYOUTS, StepInputs
from hf_hybrid_ssm.ops.local_attention.reference import STEP_EXAMPLES, attention_step_reference
from hf_hybrid_ssm.ops.local_attention.sink import check_sink
from hf_hybrid_ssm.ops.local_attention.torch_backend import attention_step_torch

UNLIMITED_BACK = Window.of((None, 0))

_OP = Op(
    "attention_step",
    builtin={"torch": attention_step_torch, "reference": attention_step_reference},
    kernels={"native": "hf_hybrid_ssm.ops.local_attention.native_step"},
    examples=STEP_EXAMPLES,
    differentiable=False,
)


def has_step_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether `slot_attention` runs a kernel there, which reads slots as they are held: torch casts all of them."""
    return _OP.select(device_type, dtype) not in _OP.builtin.values()


def slot_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None = None,
    *,
    window: Window | Limits = UNLIMITED_BACK,
    chunk_size: int | None = None,
    layout: str = "free",
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    head_scale: torch.Tensor | None = None,
    zero_kv_sink: bool = False,
    sink_logits: torch.Tensor | None = None,
    sink_values: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    r"""Attention of one token of each row to held slots: y = Σ_j softmax_j( scale · q·k_j + bias(i - j) ) v_j.

    Its own key and value are put among the held ones, in place. Without k and v, the token sees all slots, or those of
    a mask, and nothing is kept.

    Args:
        q: (B, H, 1, E).
        k, v: (B, G, 1, E) and (B, G, 1, V), or None; H / G heads in a row share keys and values.
        keys, values: (B, G, M, E) and (B, G, M, V), entries dense.
        seen: (B,) int32 or int64, tokens so far of the row's document, this one not included.
        window: (left, right) with right ≤ 0: the distances it sees are -right .. left; None for all. (0 or -1 of a
            block, None "by_rank".)
        layout: where the keys before the token are in the M slots. "free": newest last, in all slots but the last one,
            which the token gets. "by_rank": token i of the document has slot i mod M, in which it takes the place of
            token i - M after it has seen that; without a left there has to be a slot for each. "block": they are those
            of a block of M tokens, of which token i has slot i mod M, and sees the slots 0 .. i mod M; the block's
            last token leaves zeros.
        chunk_size: C, it sees only tokens of its chunk, floor(i / C).
        bias: (H, R), by distance, added to the logits; distances beyond the table take its last value.
        scale: of q·k; E**-0.5 by default.
        head_scale: (H,): first q and k are L2-normalised (x / sqrt(x·x + 1e-6)); q and bias are multiplied by its
            absolute value.
        zero_kv_sink: distances that reach before the document's start hold keys and values that are 0.
        sink_logits: (B, H, 1), the logit of one more column of the softmax; -inf where there is none. `head_scale`
            does not change it.
        sink_values: its value (H, V), or (G, V) for heads that share keys and values; 0 by default.
        mask: (B, M) bool, the slots that the token sees, without k and v. Those before the first and after the last
            one are not read.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, H, 1, V) in the dtype of q, 0 where a token sees neither a key nor a sink.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("q", q, (None, None, 1, None), "B, H, 1, E")
    batch, heads, _, size = q.shape
    check_tensor("keys", keys, (batch, None, None, size), "B, G, M, E", beside=q)
    groups, slots = keys.shape[1:3]
    check_tensor("values", values, (batch, groups, slots, None), "B, G, M, V", like=keys)
    if k is not None:
        check_tensor("k", k, (batch, groups, 1, size), "B, G, 1, E", like=q)
        check_tensor("v", v, (batch, groups, 1, values.shape[3]), "B, G, 1, V", like=q)
        check_overwritten("keys", keys, dense="entries")
        check_overwritten("values", values, dense="entries")
    check_tensor("mask", mask, (batch, slots), "B, M", beside=q, optional=True)
    if slots == 0:
        raise ValueError("keys (B, G, M, E) must have at least one slot, got M = 0.")
    if groups == 0 or heads % groups:
        raise ValueError(f"q must have a multiple of the {groups} heads of keys, got {heads}.")
    check_tensor("bias", bias, (heads, None), "H, R", beside=q, optional=True)
    check_tensor("head_scale", head_scale, (heads,), "H", beside=q, optional=True)
    window = Window.of(window)
    _check_options(k, window, chunk_size, layout, bias, zero_kv_sink, mask)
    check_sink(sink_logits, sink_values, q, values, zero_kv_sink)
    run = _OP.select(q.device.type, keys.dtype, backend)
    if k is not None or seen is not None:
        room = slots if layout == "by_rank" and window.left is None else None
        check_seen("seen", seen, batch, room, looks=run in _OP.builtin.values())  # the C kernel looks by itself
    scale = size**-0.5 if scale is None else scale
    inputs = StepInputs(
        q, k, v, keys, values, seen, bias, head_scale, sink_logits, sink_values, window.limits, chunk_size, layout,
        scale, zero_kv_sink, mask,
    )  # fmt: skip
    return run(inputs)[0]


def check_seen(
    name: str, seen: torch.Tensor | None, batch: int, room: int | None = None, *, looks: bool = True
) -> None:
    """(B,) whole numbers, none of them negative, all below `room`; values are looked at where they can be read."""
    check_tensor(name, seen, (batch,), "B")
    assert seen is not None
    if seen.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {seen.dtype}.")
    if not looks or not can_read_values(seen):
        return
    values = seen.tolist()  # no operation of torch
    if min(values, default=0) < 0:
        raise ValueError(f"{name} must not be negative: it is how many tokens there have been, got {values}.")
    if room is not None and max(values, default=0) >= room:
        raise ValueError(f"{name} must be below {room}, the number of slots, got {values}.")


def _check_options(
    k: torch.Tensor | None,
    window: Window,
    chunk_size: int | None,
    layout: str,
    bias: torch.Tensor | None,
    zero_kv_sink: bool,
    mask: torch.Tensor | None,
) -> None:
    """Those of a step that contradict each other."""
    left, right = window.limits
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} must be one of {LAYOUTS}.")
    if right is None or right > 0:
        raise ValueError(f"window={window.limits} looks ahead of the token: right must be at most 0.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    if bias is not None and bias.shape[1] == 0:
        raise ValueError("bias (H, R) must have a column for at least one distance, got R = 0.")
    if (layout == "block" or k is None) and (bias is not None or zero_kv_sink):
        raise ValueError("bias and zero_kv_sink are for windows: neither of a block, nor without k and v.")
    if layout == "block" and right < -1:
        raise ValueError(f"window={window.limits}: of a block, right must be 0 or -1.")
    if zero_kv_sink and (left is None or chunk_size is not None):
        raise ValueError("zero_kv_sink needs a window with a finite left, and no chunk_size.")
    if k is None and layout != "free":
        raise ValueError(f"layout={layout!r} is for a token that is kept: without k and v it must be 'free'.")
    if mask is not None and k is not None:
        raise ValueError("mask is for slots alone: without k and v.")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}.")


def window_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: AttentionState, rows: Rows, **options: Any
) -> tuple[torch.Tensor, AttentionState]:
    """`local_attention` of one token of each row after a state: y (B, H, 1, V), and the state after it.

    In a static cache the keys stay where they are, each in the slot of its rank; otherwise they may lie in a longer
    buffer, along which the window moves.

    Args:
        options: of `slot_attention`.
    """
    keys, values, seen = state
    if not rows.overwrites_states:
        keys, values = keys.clone(), values.clone()
    if rows.capacity is not None and keys.shape[2] > 0:
        y = slot_attention(q, k, v, keys, values, seen, layout="by_rank", **options)
        return y, AttentionState(keys, values, seen + 1)
    wide = append_slot(keys), append_slot(values)
    y = slot_attention(q, k, v, *wide, seen, **options)
    if options["window"].left is not None:
        wide = drop_oldest(wide[0]), drop_oldest(wide[1])
    return y, AttentionState(*wide, seen + 1)


def append_slot(old: torch.Tensor) -> torch.Tensor:
    """(..., P, e) → (..., P + 1, e), the same and one slot more, whose content is anything.

    A window of slots moves along a buffer that has a quarter more of them, so that a new token moves no other; where
    they are used up, the window is copied to the front of a new buffer. Only a caller that owns what is held may do
    this: the slots after a window are not those of an older copy of it.
    """
    if torch.compiler.is_compiling():
        return torch.nn.functional.pad(old, (0, 0, 0, 1))
    free, slots = getattr(old, "_free_slots", 0), old.shape[-2]
    if free == 0:
        free = max(16, slots // 4)
        buffer = old.new_empty(*old.shape[:-2], slots + free, old.shape[-1])
        buffer.narrow(-2, 0, slots).copy_(old)
        old = buffer.narrow(-2, 0, slots)
    wide: Any = old.as_strided((*old.shape[:-2], slots + 1, old.shape[-1]), old.stride(), old.storage_offset())
    wide._free_slots = free - 1
    return wide


def drop_oldest(wide: Any) -> torch.Tensor:
    """(..., P + 1, e) → (..., P, e) without the oldest slot."""
    window: Any = wide.narrow(-2, 1, wide.shape[-2] - 1)
    if not torch.compiler.is_compiling():
        window._free_slots = wide._free_slots
    return window
