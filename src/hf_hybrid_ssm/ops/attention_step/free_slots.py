"""The newest tokens of a row as a window that moves along a longer buffer, so that a new one moves no other.

A buffer has a quarter more slots than the window; where they are used up, the window is copied to the front of a new
one. Only a caller that owns what is held may do this: the slots after a window are not those of an older copy of it.
"""

import torch


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
