"""Checks at the entry of every op: one sentence that names the argument, what was given and what was expected."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_hybrid_ssm.ops.core.transforms import is_batched


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host can read values without waiting for a device."""
    return tensor.device.type == "cpu"


def can_read_values(tensor: torch.Tensor) -> bool:
    """Whether reading values is possible and cheap: on CPU, outside of tracing and vmap, and not on meta.

    Code that reads values asks this first: elsewhere a read would synchronise with the device, per layer or token.
    """
    return (
        is_on_host(tensor)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not isinstance(tensor, FakeTensor)
        and not is_batched(tensor)
    )


def check_tensor(
    name: str,
    value: torch.Tensor | None,
    shape: tuple[int | None, ...],
    letters: str,
    *,
    like: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    optional: bool = False,
) -> None:
    """Check rank, sizes (None accepts any), and optionally that dtype and device equal those of `like`, or the device
    alone that of `beside`.

    Raises:
        TypeError: not a tensor, or another dtype than `like`.
        ValueError: wrong shape or another device than `like` or `beside`.
    """
    if value is None and optional:
        return
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of shape ({letters}), got {type(value).__name__}.")
    if value.shape != shape and not _fits(value.shape, shape):  # mostly all sizes are given
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({letters}) = ({wanted}), got {tuple(value.shape)}.")
    if like is not None and value.dtype != like.dtype:
        raise TypeError(f"{name} must have dtype {like.dtype} like the other inputs, got {value.dtype}.")
    other = beside if like is None else like
    if other is not None and value.device != other.device:
        raise ValueError(f"{name} must be on {other.device} like the other inputs, got {value.device}.")


def _fits(have: torch.Size, shape: tuple[int | None, ...]) -> bool:
    if len(have) != len(shape):
        return False
    for size, wanted in zip(have, shape):  # noqa: SIM110 - a generator costs more than what it compares
        if wanted is not None and size != wanted:
            return False
    return True


def check_overwritten(name: str, value: torch.Tensor, *, dense: str) -> None:
    """What a step overwrites must be laid out as `dense` says: "contiguous", or "entries" for its last dimension.

    Raises:
        ValueError: it is not.
    """
    if dense == "contiguous" and not value.is_contiguous():
        raise ValueError(f"{name} is overwritten and must be contiguous, got strides {value.stride()}.")
    if dense != "entries":
        return
    strides = value.stride()
    if strides[-1] != 1 and value.shape[-1] > 1:
        raise ValueError(f"{name} is overwritten and its last stride must be 1, got strides {strides}.")
    if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, value.shape)):
        raise ValueError(f"{name} is overwritten and its entries must not share memory, got strides {strides}.")


def check_seq_idx(seq_idx: torch.Tensor, batch: int | None, length: int | None) -> None:
    """`seq_idx` (B, L) integer: the document each token of a packed row belongs to, never decreasing along a row.

    The order is checked only where the values can be read. Of B and L, None accepts any.
    """
    check_tensor("seq_idx", seq_idx, (batch, length), "B, L")
    if seq_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seq_idx must be int32 or int64, got {seq_idx.dtype}.")
    if seq_idx.shape[1] > 1 and can_read_values(seq_idx) and bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
        raise ValueError("seq_idx must not decrease along a row: each document of a packed row is one contiguous run.")


def check_mask_values(mask: torch.Tensor, token_mask: torch.Tensor, name: str) -> None:
    """A mask (B, L) holds 1 for text and 0 for padding; `token_mask` is `mask != 0`. Reads values.

    Raises:
        ValueError: it holds something else.
    """
    if bool((mask * token_mask != token_mask).any()):
        low, high = (bound.item() for bound in torch.aminmax(mask))
        raise ValueError(
            f"{name} must be 1 for text and 0 for padding, got values from {low} to {high}; documents of a "
            "packed row go to seq_idx, and an additive mask is not understood."
        )
