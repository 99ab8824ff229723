"""torch's own kernel, which is fast in bfloat16.

Its vectors are loaded from addresses that are multiples of the vector's size, or the process ends; scales are read
four at a time, beyond the last one too; rows are read in whole vectors, and with a rest its values are wrong.
"""

import torch
from torch import Tensor, nn

from hf_hybrid_ssm.ops.int8_product.reference import Int8Inputs

ALIGNMENT = 64  # bytes: what torch's allocator gives, and no vector is longer
SCALES_READ = 4
COLUMNS = 16

_KERNEL = torch.ops.aten._weight_int8pack_mm


def fitted(tensor: Tensor) -> Tensor:
    """The tensor, contiguous at an aligned address: itself, or a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def int8_product_torch(inputs: Int8Inputs) -> tuple[Tensor]:
    """As `hf_hybrid_ssm.ops.int8_product.int8_product`."""
    x, codes, scales = inputs.x.detach(), inputs.codes, inputs.scales.detach()
    if x.shape[1] % COLUMNS or x.dtype == torch.float64 or x.device.type != "cpu":
        wide = torch.promote_types(x.dtype, torch.float32)  # sums are beyond float16 before they are scaled
        return ((nn.functional.linear(x.to(wide), codes.to(wide)) * scales.to(wide)).to(x.dtype),)
    count = len(scales)
    if count % SCALES_READ:
        scales = nn.functional.pad(scales, (0, -count % SCALES_READ))[:count]
    return (_KERNEL(fitted(x), fitted(codes), fitted(scales)),)
