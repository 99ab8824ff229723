"""Results that depend on parameters alone, computed once while the parameters are constants."""

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.ops._core.transforms import is_transforming, without_autocast


class CachedKernelMixer(Mixer):
    """A mixer that caches its kernel while the parameters it comes from are constants: frozen, or without autograd.

    What is cached is computed in float64, is not part of the state dict, and is dropped when a parameter is written,
    loaded, replaced, moved or cast. Inside `torch.compile` writes cannot be seen; there only frozen
    parameters count as constants, and the ways that weights change outside of it (loading, moving, casting,
    `reset_parameters`) still drop it. Inside a function transform (`torch.func`, forward-mode differentiation)
    no parameter counts as a constant.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._kernel_cache: dict[Any, Any] = {}
        self._versions: list[Any] = []
        super().__init__(*args, **kwargs)

    def _own_parameters(self) -> dict[str, torch.Tensor]:
        """Of this module itself, by name. A replica of `nn.DataParallel` has copies of them instead."""
        params = self._parameters or getattr(self, "_former_parameters", {})
        return {name: param for name, param in params.items() if param is not None}

    def _trains(self, names: tuple[str, ...]) -> bool:
        params = self._own_parameters()
        return any(params[name].requires_grad for name in names if name in params)

    def _cached(self, key: Any, names: tuple[str, ...], compute: Any) -> Any:
        """`compute()`, cached under `key` while the parameters `names` are constants."""
        leave: Any = contextlib.nullcontext()
        trains = (torch.compiler.is_compiling() or torch.is_grad_enabled()) and self._trains(names)
        if trains or is_transforming():
            if not torch.compiler.is_compiling():
                self._kernel_cache.pop(key, None)  # FSDP writes into gathered parameters without a trace
            with self._without_autocast():
                return compute(False)
        if not torch.compiler.is_compiling():
            self._clear_if_changed()
            if torch.is_inference_mode_enabled():  # autograd could not use tensors made there
                leave = torch.inference_mode(False)
        if key not in self._kernel_cache:
            with leave, torch.no_grad(), self._without_autocast():
                self._kernel_cache[key] = compute(True)
        return self._kernel_cache[key]

    def _without_autocast(self) -> contextlib.AbstractContextManager:
        """Powers and kernels keep the precision of their parameters, whatever the model around computes in."""
        return without_autocast(self._device.type)

    def _clear_if_changed(self) -> None:
        """Writes into a parameter leave no other trace than its version; a replaced parameter is another object."""
        seen = [
            (id(param), _address(param), -1 if param.is_inference() else param._version, param)
            for param in self._own_parameters().values()
        ]
        if [mark[:3] for mark in seen] != [mark[:3] for mark in self._versions]:
            self._kernel_cache = {}
            self._versions = seen  # which keeps the parameters: no other can have the id of one of them

    def clear_kernel_cache(self) -> None:
        self._kernel_cache = {}
        self._versions = []

    # the ways that parameters change, but for writes into them

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
        return {**self.__dict__, "_kernel_cache": {}, "_versions": []}

    @property
    def _device(self) -> torch.device:
        return next(iter(self._own_parameters().values())).device

    def _computing_dtype(self, u: torch.Tensor) -> torch.dtype:
        dtypes = (u.dtype, *(param.dtype for param in self._own_parameters().values()))
        return torch.float64 if torch.float64 in dtypes else torch.float32


def fold_token(back: torch.Tensor, ahead: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels that look back and ahead from the token itself, as `long_conv` takes them: the one ahead starts at the
    next token."""
    return torch.cat([back[..., :1] + ahead[..., :1], back[..., 1:]], dim=-1), ahead[..., 1:]


def _address(param: torch.Tensor) -> int:
    """Where its numbers lie; 0 if it has none."""
    return 0 if isinstance(param, FakeTensor) else param.data_ptr()
