"""Torch's products for weights of 8 and 4 bits on CPUs, given what they read without a check.

Their vectors are loaded from addresses that are multiples of the vector's size, or the process ends; tensors of a file
that was mapped, and views, begin anywhere. Scales of 8 bits are read four at a time, beyond the last one too.
"""

import torch
from torch import Tensor, nn

from hf_hybrid_ssm.ops.core.custom_ops import step_op

ALIGNMENT = 64  # bytes: what torch's allocator gives, and no vector is longer
SCALES_READ = 4

_INT8 = torch.ops.aten._weight_int8pack_mm
_INT4 = torch.ops.aten._weight_int4pack_mm_for_cpu


def fitted(tensor: Tensor) -> Tensor:
    """The tensor, contiguous at an aligned address: itself, or a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _product(inputs: Tensor, codes: Tensor, scales: Tensor, group_size: int) -> Tensor:
    inputs, codes = fitted(inputs), fitted(codes)
    if group_size:
        return _INT4(inputs, codes, group_size, fitted(scales))
    count = len(scales)
    if count % SCALES_READ:
        scales = nn.functional.pad(scales, (0, -count % SCALES_READ))[:count]
    return _INT8(inputs, codes, fitted(scales))


def _fake_product(inputs: Tensor, codes: Tensor, scales: Tensor, group_size: int) -> Tensor:
    return inputs.new_empty(inputs.shape[0], codes.shape[0])


_op = step_op("hf_hybrid_ssm::low_bit_product", _product, _fake_product, ())


def low_bit_product(inputs: Tensor, codes: Tensor, scales: Tensor, group_size: int = 0) -> Tensor:
    """`inputs` times the weight of these codes, wherever the tensors lie: what does not fit is copied, in each call.

    Args:
        inputs: (R, I), float32, bfloat16 or float16; I is a multiple of 16 with 8 bits.
        codes: with 8 bits int8 (O, I); with 4 bits uint8 (O, I / 2), packed for this processor, O a multiple of 16.
        scales: in the inputs' dtype, (O,), or with 4 bits (I / group_size, O, 2), scale and zero.
        group_size: columns of a group with 4 bits, 0 with 8.

    Returns:
        (R, O) in the inputs' dtype. Compiled and exported programs have it as one op.
    """
    return _op(inputs, codes, scales, group_size)
