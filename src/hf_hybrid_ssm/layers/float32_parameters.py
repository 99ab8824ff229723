"""Tensors that stay float32 when a model is cast in place."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized


class Float32ParametersMixin(nn.Module):
    """A module some of whose own parameters and buffers stay float32 (or float64) through `.to(bfloat16)`, `.half()`.

    `from_pretrained(dtype=...)` keeps them by the model's `_keep_in_fp32_modules_strict`; a cast in place asks each
    module, and would round them for good.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        protected: set[int] = set()
        for name in self.float32_parameters:
            for tensor in self._tensors_behind(name):
                protected.update(id(part) for part in (tensor, tensor.grad) if part is not None)

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            if id(tensor) not in protected or out.dtype not in (torch.float16, torch.bfloat16):
                return out
            return torch.empty_like(out, dtype=tensor.dtype) if tensor.is_meta else tensor.to(out.device)

        return super()._apply(keep_precision, recurse)

    def _tensors_behind(self, name: str) -> list[torch.Tensor]:
        """The parameter or buffer, or what a parametrization computes it from."""
        if is_parametrized(self, name):
            return [*self.parametrizations[name].parameters(), *self.parametrizations[name].buffers()]  # type: ignore[index,union-attr]
        values = (tensors.get(name) for tensors in (self._parameters, self._buffers))
        return [tensor for tensor in values if tensor is not None]
