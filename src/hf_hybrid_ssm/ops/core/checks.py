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
    if not _fits(value.shape, shape):
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


def check_seq_idx(seq_idx: torch.Tensor | None, batch: int, length: int) -> None:
    """`seq_idx` (B, L) integer: the document each token of a packed row belongs to, never decreasing along a row.

    The order is checked only where the values can be read.
    """
    if seq_idx is None:
        return
    check_tensor("seq_idx", seq_idx, (batch, length), "B, L")
    if seq_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seq_idx must be int32 or int64, got {seq_idx.dtype}.")
    if length > 1 and can_read_values(seq_idx) and bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
        raise ValueError("seq_idx must not decrease along a row: each document of a packed row is one contiguous run.")


def check_lengths(lengths: torch.Tensor | None, batch: int, length: int) -> None:
    """`lengths` (B,) integer in 0..L. The range is checked only where the values can be read.

    Raises:
        TypeError: not an integer tensor.
        ValueError: wrong shape or a value out of range.
    """
    if lengths is None:
        return
    check_tensor("lengths", lengths, (batch,), "B")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}.")
    if can_read_values(lengths) and bool(((lengths < 0) | (lengths > length)).any()):
        raise ValueError(f"lengths must lie in 0..{length}, the length of the row, got {lengths.tolist()}.")


def check_output_positions(stride: int | None, positions: torch.Tensor | None, batch: int, length: int) -> None:
    """The two ways to ask for some outputs only: every `stride`-th token, or those at `positions` (B, J) of each row.

    Raises:
        TypeError: `positions` is not an int64 tensor.
        ValueError: both are given, `stride` < 1, or `positions` has the wrong shape or values outside of 0..L-1.
    """
    if stride is not None and stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}.")
    if positions is None:
        return
    if stride is not None:
        raise ValueError(f"stride={stride} and positions are two ways to say which outputs are wanted: give one.")
    check_tensor("positions", positions, (batch, None), "B, J")
    if positions.dtype != torch.int64:
        raise TypeError(f"positions must be int64, got {positions.dtype}.")
    if can_read_values(positions) and bool(((positions < 0) | (positions >= length)).any()):
        raise ValueError(f"positions must lie in 0..{length - 1}, got {int(positions.min())}..{int(positions.max())}.")
