# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 5b2236f9e559fad18ca4659da91ea75d66d358e88ea8d4d20ca7f343c68bab6f

from typing import Any

import torch
import torch.nn.functional as F

from .dispatch import Op, check_tensor
from .local_attention import AttentionState


# ---- ops/attention_step/free_slots.py -------------------------------------------------------------------------------
# The newest tokens of a row as a window that moves along a longer buffer, so that a new one moves no other.
#
# A buffer has a quarter more slots than the window; where they are used up, the window is copied to the front of a new
# one. Only a caller that owns what is held may do this: the slots after a window are not those of an older copy of it.

def with_free_slot(held: torch.Tensor) -> torch.Tensor:
    """(..., P, e) → (..., P + 1, e), the same and one slot more, whose content is anything."""
    if torch.compiler.is_compiling():
        return torch.nn.functional.pad(held, (0, 0, 0, 1))
    free, slots = getattr(held, "_free_slots", 0), held.shape[-2]
    if free == 0:
        free = max(16, slots // 4)
        buffer = held.new_empty(*held.shape[:-2], slots + free, held.shape[-1])
        buffer.narrow(-2, 0, slots).copy_(held)
        held = buffer.narrow(-2, 0, slots)
    wide = held.as_strided((*held.shape[:-2], slots + 1, held.shape[-1]), held.stride(), held.storage_offset())
    wide._free_slots = free - 1  # type: ignore[attr-defined]
    return wide


def shifted(wide: torch.Tensor) -> torch.Tensor:
    """(..., P + 1, e) → (..., P, e) without the oldest slot."""
    held = wide.narrow(-2, 1, wide.shape[-2] - 1)
    if not torch.compiler.is_compiling():
        held._free_slots = wide._free_slots  # type: ignore[attr-defined]
    return held


# ---- ops/attention_step/reference.py --------------------------------------------------------------------------------
# Attention of one token, row by row: a softmax over the list of keys that it may see.

def attention_step_reference(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.attention_step.attention_step`; computes in float32, or float64 for float64 inputs."""
    dtype, output_dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    if head_scale is not None:
        factor = head_scale.abs().to(dtype).unsqueeze(1)
        q, k = _reference_normalised(q, dtype) * factor, None if k is None else _reference_normalised(k, dtype)
        bias = None if bias is None else bias * factor
    y = torch.zeros(*q.shape[:2], values.shape[3], dtype=dtype)
    for b in range(q.shape[0]):
        own = None if k is None else (k[b], v[b])
        rank = 0 if seen is None else int(seen[b])
        visible = _visible(keys[b].clone(), values[b].clone(), own, rank, window, chunk_size, block, shift)
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // keys.shape[1])
            logits, seen_values = [], []
            for key, value, distance in visible:
                logits.append((q[b, h].to(dtype) * key[g].to(dtype)).sum() * scale + _bias(bias, h, distance, dtype))
                seen_values.append(value[g].to(dtype))
            for distance in range(max(-window[1], rank + 1), window[0] + 1) if zero_kv_sink else ():
                logits.append(_bias(bias, h, distance, dtype))
                seen_values.append(torch.zeros_like(y[b, h]))
            if logits:
                y[b, h] = (torch.stack(logits).softmax(0).unsqueeze(-1) * torch.stack(seen_values)).sum(0)
        if k is not None:
            _keep(keys[b], k[b], rank, block, shift)
            _keep(values[b], v[b], rank, block, shift)
    return y.to(output_dtype), keys, values


def _visible(keys, values, own, rank, window, chunk_size, block, shift):
    """(key, value, distance) of what the token sees."""
    slots = keys.shape[1]
    if own is None:
        return [(keys[:, j], values[:, j], 0) for j in range(slots)]
    left, right = window
    if block:
        held = [(keys[:, j], values[:, j], rank % slots - j) for j in range(rank % slots)]
    else:
        before = slots if shift else slots - 1
        held = [(keys[:, j], values[:, j], before - j) for j in range(before) if before - j <= rank]
    known = [*held, (*own, 0)]
    if block:
        return [part for part in known if part[2] >= -right]
    reach = rank if left is None else left
    reach = reach if chunk_size is None else min(reach, rank % chunk_size)
    return [part for part in known if -right <= part[2] <= reach]


def _keep(held, new, rank, block, shift):
    """The new key or value (G, e) among the held ones (G, M, e), in place."""
    if block and rank % held.shape[1] == held.shape[1] - 1:
        held.zero_()
        return
    if shift:
        held[:, :-1] = held[:, 1:].clone()
    held[:, rank % held.shape[1] if block else -1] = new


def _reference_normalised(x, dtype):
    x = x.to(dtype)
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _bias(bias, head, distance, dtype):
    return torch.zeros((), dtype=dtype) if bias is None else bias[head, min(distance, bias.shape[1] - 1)].to(dtype)


# ---- ops/attention_step/self_check_inputs.py ------------------------------------------------------------------------
# A small step on which kernels are checked: shared keys, a row at its start, entries that do not fill a vector.

def self_check_inputs() -> dict:
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 18), "k": (2, 2, 18), "v": (2, 2, 5), "keys": (2, 2, 7, 18), "values": (2, 2, 7, 5)}
    shapes |= {"bias": (4, 5), "head_scale": (4,)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    options = {"window": (6, -1), "chunk_size": None, "block": False, "scale": 1.0, "zero_kv_sink": True}
    return tensors | options | {"seen": torch.tensor([3, 40]), "shift": False}


# ---- ops/attention_step/torch_backend.py ----------------------------------------------------------------------------
# Attention of one token in torch: its key into its slot, a mask by distance, torch's fused attention.

def attention_step_torch(
    q, k, v, keys, values, seen, *, window, chunk_size, block, bias, scale, head_scale, zero_kv_sink, shift
):
    """See `hf_hybrid_ssm.ops.attention_step.attention_step`."""
    dtype = q.dtype if q.dtype == torch.float64 or q.device.type != "cpu" else torch.float32
    output_dtype, q = q.dtype, q.to(dtype)
    if head_scale is not None:
        factor = head_scale.abs().unsqueeze(1).to(torch.promote_types(dtype, torch.float32))
        q, k = (_torch_backend_normalised(q) * factor).to(dtype), None if k is None else _torch_backend_normalised(k)
        bias = None if bias is None else bias * factor
    options = {"scale": scale, "enable_gqa": q.shape[1] != keys.shape[1]}
    if k is None:
        y = _attend(q, keys, values, None, None, **options)
    elif block:
        slot = (seen % keys.shape[2]).unsqueeze(1)
        for held, new in ((keys, k), (values, v)):
            index = slot.view(-1, 1, 1, 1).expand(-1, held.shape[1], 1, held.shape[3])
            held.scatter_(2, index, new.to(held.dtype).unsqueeze(2))
        mask = torch.arange(-window[1], keys.shape[2] - window[1], device=q.device) <= slot
        y = _attend(q, keys, values, mask, slot < -window[1] if window[1] else None, **options)
        over = slot.view(-1, 1, 1, 1) == keys.shape[2] - 1
        keys.masked_fill_(over, 0.0)
        values.masked_fill_(over, 0.0)
    else:
        used = [_joined(held, new, shift) for held, new in ((keys, k), (values, v))]
        where = {"seen": seen.unsqueeze(1), "window": window, "chunk_size": chunk_size}
        y = _attend_window(q, used[0], used[1], bias, zero_kv_sink, **where, **options)
        if shift:
            keys.copy_(used[0][:, :, 1:])
            values.copy_(used[1][:, :, 1:])
    return y.to(output_dtype), keys, values


def _attend_window(q, keys, values, bias, zero_kv_sink, *, seen, window, chunk_size, **options):
    """Of the slots, whose last is the token's own, those at the distances of the window are taken as a view."""
    left, right = window
    farthest = keys.shape[2] - 1 if left is None else min(left, keys.shape[2] - 1)
    begin, end = keys.shape[2] - 1 - farthest, keys.shape[2] + right
    keys, values = keys[:, :, begin:end], values[:, :, begin:end]
    distance = torch.arange(farthest, -right - 1, -1, device=q.device)
    reach = seen if chunk_size is None else seen % chunk_size
    mask, empty = distance <= reach, reach < -right if right else None
    if zero_kv_sink:  # what lies before the document's start is as good as a key and a value of zeros
        missing, mask, empty = ~mask[:, None, :, None], None, None
        keys, values = keys.masked_fill(missing, 0.0), values.masked_fill(missing, 0.0)
    logits = None if bias is None else bias[:, distance.clamp(max=bias.shape[1] - 1)].unsqueeze(1).to(q.dtype)
    return _attend(q, keys, values, mask, empty, logits, **options)


def _attend(q, keys, values, mask, empty, logits=None, **options):
    """q (B, H, E), keys and values (B, G, M, e); mask (B, M) bool, logits (H, 1, M); empty (B, 1): sees nothing."""
    if mask is not None:
        # a softmax over nothing is not finite; such rows are overwritten below
        mask = (mask if empty is None else mask | empty)[:, None, None]
        logits = mask if logits is None else torch.where(mask, logits, float("-inf"))
    elif logits is not None:
        logits = logits.unsqueeze(0)
    options["attn_mask"] = logits
    y = F.scaled_dot_product_attention(q.unsqueeze(2), keys.to(q.dtype), values.to(q.dtype), **options).squeeze(2)
    return y if empty is None else y.masked_fill(empty.unsqueeze(2), 0.0)


def _joined(held: torch.Tensor, new: torch.Tensor, shift: bool) -> torch.Tensor:
    new = new.to(held.dtype).unsqueeze(2)
    if shift:
        return torch.cat([held, new], 2)
    held[:, :, -1:].copy_(new)
    return held


def _torch_backend_normalised(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(|x|² + 1e-6) in float32 or wider, as the root-mean-square norm that it is."""
    size = x.shape[-1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, (size,), eps=1e-6 / size) * size**-0.5


# ---- ops/attention_step/__init__.py ---------------------------------------------------------------------------------
# Attention of one token to held keys and values, in decoding: what is held is overwritten, nothing has a gradient.

_OP = Op(
    "attention_step",
    builtin={"torch": attention_step_torch, "reference": attention_step_reference},
    kernels={},
    self_check_inputs=self_check_inputs,
    differentiable=False,
)


def attention_step(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None = None,
    *,
    window: tuple[int | None, int] = (None, 0),
    chunk_size: int | None = None,
    block: bool = False,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    head_scale: torch.Tensor | None = None,
    zero_kv_sink: bool = False,
    shift: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    r"""`local_attention` of one token of each row: y = Σ_j softmax_j( scale · q·k_j + bias(i - j) ) v_j.

    Its own key and value are put among the held ones, in place. The M slots hold, newest last, the keys before it: in
    all of them, and then they move up by one (`shift`), or in all but the last one, which is free. With `block`, they
    are those of a block of M tokens instead: token i has slot i mod M, sees the slots 0 .. i mod M, and the block's
    last token leaves zeros. Without k and v, the token sees all slots, and nothing is kept.

    Args:
        q: (B, H, E).
        k, v: (B, G, E) and (B, G, V), or None; H / G heads in a row share keys and values.
        keys, values: (B, G, M, E) and (B, G, M, V), entries dense.
        seen: (B,) int64, tokens so far of the row's document, this one not included.
        window: (left, right) with right ≤ 0: the distances it sees are -right .. left; None for all. (0 or -1 with
            `block`.)
        chunk_size: C, it sees only tokens of its chunk, floor(i / C).
        bias: (H, R), by distance, added to the logits; distances beyond the table take its last value.
        scale: of q·k; E**-0.5 by default.
        head_scale: (H,): first q and k are L2-normalised (x / sqrt(|x|² + 1e-6)); q and bias are multiplied by its
            absolute value.
        zero_kv_sink: distances that reach before the document's start hold keys and values that are 0.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, H, V) in the dtype of q, 0 where a token sees nothing.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("q", q, (None, None, None), "B, H, E")
    batch, heads, size = q.shape
    check_tensor("keys", keys, (batch, None, None, size), "B, G, M, E")
    groups, slots = keys.shape[1:3]
    check_tensor("values", values, (batch, groups, slots, None), "B, G, M, V", like=keys)
    if k is not None:
        check_tensor("k", k, (batch, groups, size), "B, G, E", like=q)
        check_tensor("v", v, (batch, groups, values.shape[3]), "B, G, V", like=q)
        check_tensor("seen", seen, (batch,), "B")
    if heads % groups:
        raise ValueError(f"q must have a multiple of the {groups} heads of keys, got {heads}.")
    if window[1] > 0:
        raise ValueError(f"window={window} looks ahead of the token: right must be at most 0.")
    run = _OP.select(q.device.type, keys.dtype, backend)
    options = {"window": window, "chunk_size": chunk_size, "block": block, "bias": bias, "head_scale": head_scale}
    options |= {"scale": size**-0.5 if scale is None else scale, "zero_kv_sink": zero_kv_sink, "shift": shift}
    return run(q, k, v, keys, values, seen, **options)[0]


def window_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: AttentionState, *, keeps_address: bool, **options: Any
) -> tuple[torch.Tensor, AttentionState]:
    """`attention_step` from a state of `local_attention` to the next one, which overwrites it.

    Args:
        keeps_address: the keys stay where they are, and move up by one; otherwise they may lie in a longer buffer, and
            the window moves along it.
        options: of `attention_step`.
    """
    keys, values, seen = state
    if keeps_address and keys.shape[2] > 0:
        y = attention_step(q, k, v, keys, values, seen, shift=True, **options)
        return y, AttentionState(keys, values, seen + 1)
    wide = with_free_slot(keys), with_free_slot(values)
    y = attention_step(q, k, v, *wide, seen, **options)
    if options["window"][0] is not None:
        wide = shifted(wide[0]), shifted(wide[1])
    return y, AttentionState(*wide, seen + 1)
