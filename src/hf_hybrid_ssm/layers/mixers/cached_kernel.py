"""Results that depend on parameters alone, computed once while the parameters are constants."""

import contextlib
import ctypes
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.ops.core.transforms import is_exporting, is_transforming, without_autocast


class ValueMark:
    """Detects changes of a tensor on the CPU by a copy of its values: also writes that torch does not count, through
    `.data`, a numpy view or another process."""

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
        """The bytes of `holder`, valid while it exists."""
        return self.bytes_type.from_address(holder.data_ptr()) if holder.numel() else self.bytes_type()


class VersionMark:
    """Detects changes of a tensor on another device, where comparing values would synchronise: by the object, its
    address and torch's version counter, which misses writes through `.data`."""

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
    """The tensor itself if its memory holds its values contiguously, else a copy."""
    is_plain = tensor.is_contiguous() and not tensor.is_neg()
    return tensor if is_plain else tensor.detach().resolve_neg().contiguous()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a real tensor as integers, which are compared whole vectors at a time, NaN too."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = -1 if tensor.is_inference() else tensor._version
    return id(tensor), 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr(), version


class CachedKernelMixer(Mixer):
    """A mixer that caches its kernel while the parameters it comes from are constants: frozen, or without autograd.

    What is cached is computed in float64, is not part of the state dict, and is dropped when a parameter is written,
    loaded, replaced, moved or cast. On the CPU parameters are compared by value, so that every write is detected. On
    other devices a write through `.data` (or by another library into the same memory) is not detected: call
    `clear_kernel_cache` after it, or `clear_kernel_caches` of the model. Inside `torch.compile` only frozen parameters
    count as constants; a compiled program compares them with copies, and raises RuntimeError where one was written in
    place, since it cannot compute anew (loading, moving, casting and `reset_parameters` drop the cache before); an
    exported program holds what was computed, and compares nothing. Inside a function transform (`torch.func`, forward-
    mode differentiation) no parameter counts as a constant.

    Parameters are the attributes with these names, whatever stands behind them: the `nn.Parameter`, or what a
    parametrization, a forward hook (`torch.nn.utils.prune`) or a replica of `nn.DataParallel` puts in its place.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._kernel_cache: dict[Any, Any] = {}
        self._token_cache: dict[Any, Any] = {}  # apart, since a compiled step looks at the keys of what it reads
        self._marks: dict[str, ValueMark | VersionMark] = {}
        self._copies: dict[str, torch.Tensor] = {}  # the parameters that the cache was computed from
        super().__init__(*args, **kwargs)

    def _own_parameters(self) -> dict[str, torch.Tensor]:
        """This module's own parameters as they are now: those its class declares, and what else is registered."""
        names = dict.fromkeys((*self.dynamics_parameters, *self.output_parameters, *self._parameters))
        values = ((name, getattr(self, name, None)) for name in names)
        return {name: value for name, value in values if value is not None}

    def _cached(self, key: Any, compute: Any) -> Any:
        """`compute()`, cached under `key` while this module's own parameters are constants."""
        leave: Any = contextlib.nullcontext()
        is_compiling = torch.compiler.is_compiling()
        tensors = self._own_parameters()
        trains = (is_compiling or torch.is_grad_enabled()) and any(one.requires_grad for one in tensors.values())
        if trains or is_transforming():
            if not is_compiling:
                self._kernel_cache, self._token_cache = {}, {}  # FSDP writes without a change of version
            with self._without_autocast():
                return compute(False)
        if is_compiling:
            if not is_exporting():  # that program has parameters of its own, which nobody trains
                self._assert_unchanged(tensors)
        else:
            self._clear_if_changed(tensors)
            if torch.is_inference_mode_enabled():  # autograd could not use tensors made there
                leave = torch.inference_mode(False)
        cache = self._token_cache if key[0] == "token" else self._kernel_cache
        if key not in cache:
            with leave, torch.no_grad(), self._without_autocast():
                cache[key] = compute(True)
                for name in tensors.keys() - self._copies.keys():  # a compiler makes no marks
                    self._copies[name] = tensors[name].detach().clone()
        return cache[key]

    def _without_autocast(self) -> contextlib.AbstractContextManager:
        """Powers and kernels keep the precision of their parameters, whatever the model around computes in."""
        return without_autocast(self._device.type)

    def _clear_if_changed(self, tensors: dict[str, torch.Tensor]) -> None:
        """Drop everything if one of the parameters is not what it was; those seen for the first time are noted."""
        known = [(self._marks.get(name), tensor) for name, tensor in tensors.items()]
        by_compiler = self._copies.keys() - self._marks.keys()
        if by_compiler or any(mark is not None and mark.has_changed(tensor) for mark, tensor in known):
            self.clear_kernel_cache()
        for name, tensor in tensors.items():
            if name not in self._marks:
                self._marks[name] = mark = mark_of(tensor)
                self._copies[name] = mark.copy

    def _assert_unchanged(self, tensors: dict[str, torch.Tensor]) -> None:
        """Have a compiled program compare the parameters with those that its cache was computed from."""
        for name, copy in self._copies.items():
            tensor = tensors.get(name)
            if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (
                copy.shape,
                copy.dtype,
                copy.device,
            ):
                self.clear_kernel_cache()
                return
        message = (
            f"{type(self).__name__}: frozen parameters were written in place, and a compiled program holds what was "
            "computed from them before. Call clear_kernel_caches() of the model (clear_kernel_cache() of the layer)."
        )
        for name, copy in self._copies.items():
            if name in tensors:
                torch._assert_async((_bits(tensors[name]) == _bits(copy)).all(), message)

    def clear_kernel_cache(self) -> None:
        self._kernel_cache, self._token_cache = {}, {}
        self._marks, self._copies = {}, {}

    # all ways in which parameters change, other than in-place writes

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.clear_kernel_cache()

    def _apply(self, fn: Any, recurse: bool = True) -> "CachedKernelMixer":
        super()._apply(fn, recurse)
        self.clear_kernel_cache()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.clear_kernel_cache()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernel_cache": {}, "_token_cache": {}, "_marks": {}, "_copies": {}}

    def _replicate_for_data_parallel(self) -> "CachedKernelMixer":
        replica = super()._replicate_for_data_parallel()
        replica.clear_kernel_cache()  # what the original caches lies on its device
        return replica

    @property
    def _device(self) -> torch.device:
        return next(iter(self._own_parameters().values())).device

    def _computing_dtype(self, u: torch.Tensor) -> torch.dtype:
        dtypes = (u.dtype, *(tensor.dtype for tensor in self._own_parameters().values()))
        return torch.float64 if torch.float64 in dtypes else torch.float32


def fold_token(back: torch.Tensor, ahead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels that look back and ahead from the token itself, as `long_conv` takes them: the one ahead starts at the
    next token."""
    return torch.cat([back[..., :1] + ahead[..., :1], back[..., 1:]], dim=-1), ahead[..., 1:]
