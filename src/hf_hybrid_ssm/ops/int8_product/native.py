"""The fused CPU backend: `native.c`, which reads a weight once, at the speed of memory."""

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.native_library import CFunction, contiguous, library_beside, prepared, supports
from hf_hybrid_ssm.ops.int8_product.reference import Int8Inputs

__all__ = ["int8_product_native", "supports"]

PRODUCT = CFunction(
    library_beside(__file__),
    "int8_product",
    "x[R I], codes[O I] int8, scales[O] held, y[R O] held",
    "narrow, R, I, O",
)


def int8_product_native(inputs: Int8Inputs) -> tuple[Tensor]:
    """As `hf_hybrid_ssm.ops.int8_product.int8_product`."""
    x, codes, scales = inputs
    narrow = x.dtype == torch.bfloat16
    held = torch.bfloat16 if narrow else torch.float32
    y = x.new_empty((x.shape[0], codes.shape[0]), dtype=held)
    PRODUCT((prepared(x), contiguous(codes, torch.int8), contiguous(scales, held), y), narrow)
    return (y.to(x.dtype),)
