# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 3afa0887232c7995d35fcd5aa99c7051d65182da5d67090bab2957be2fc58aac

from typing import Any, ClassVar

import torch
from torch import nn


# ---- layers/float32_parameters.py -----------------------------------------------------------------------------------
# Tensors that stay float32 when a model is cast in place.

class Float32ParametersMixin(nn.Module):
    """A module some of whose own parameters and buffers stay float32 (or float64) through `.to(bfloat16)`, `.half()`.

    `from_pretrained(dtype=...)` keeps them by the model's `_keep_in_fp32_modules_strict`; a cast in place asks each
    module, and would round them for good.
    """

    float32_parameters: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        protected: set[int] = set()
        for name in self.float32_parameters:
            tensor = self._parameters.get(name)
            tensor = self._buffers.get(name) if tensor is None else tensor
            if tensor is not None:
                protected.update(id(kept) for kept in (tensor, tensor.grad) if kept is not None)

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            if id(tensor) not in protected or out.dtype not in (torch.float16, torch.bfloat16):
                return out
            return torch.empty_like(out, dtype=tensor.dtype) if tensor.is_meta else tensor.to(out.device)

        return super()._apply(keep_precision, recurse)
