"""Whether a parameter still has the values from which something was computed."""

import ctypes
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class ValueMark:
    """Remembers a tensor on the CPU by a copy of its numbers. No write escapes it, whatever torch counts: also one
    through `.data`, a numpy view or another process."""

    def __init__(self, tensor: torch.Tensor):
        self.kind = (type(tensor), tensor.dtype, tensor.shape, tensor.device)
        self.bytes_type = ctypes.c_char * (tensor.numel() * tensor.element_size())
        holder = _plain(tensor)
        self.values = bytearray(self._memory(holder))
        flat = torch.frombuffer(self.values, dtype=tensor.dtype) if self.values else torch.empty(0, dtype=tensor.dtype)
        self.copy = flat.view(tensor.shape)

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` differs in anything; one `memcmp`, and no operation of torch if it is contiguous."""
        if (type(tensor), tensor.dtype, tensor.shape, tensor.device) != self.kind:
            return True
        holder = _plain(tensor)
        return self.values != self._memory(holder)

    def _memory(self, holder: torch.Tensor) -> ctypes.Array:
        """The numbers where they lie, to be read while `holder` lives."""
        return self.bytes_type.from_address(holder.data_ptr()) if holder.numel() else self.bytes_type()


class VersionMark:
    """Remembers a tensor elsewhere, where a comparison of values would wait for the device: the object, its memory
    and torch's count of writes. Writes through `.data` leave no trace there."""

    def __init__(self, tensor: torch.Tensor):
        self.kind = _identity(tensor)
        self.holder = tensor  # no other can have its id
        self.copy = tensor.detach().clone()

    def has_changed(self, tensor: torch.Tensor) -> bool:
        return _identity(tensor) != self.kind


def mark_of(tensor: torch.Tensor) -> ValueMark | VersionMark:
    has_values = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)
    return ValueMark(tensor) if has_values and not is_traceable_wrapper_subclass(tensor) else VersionMark(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory holds its numbers in their order, else a copy that does."""
    is_plain = tensor.is_contiguous() and not tensor.is_neg()
    return tensor if is_plain else tensor.detach().resolve_neg().contiguous()


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr(), version
