"""Products with weights of 8 and 4 bits on CPUs, and the order in which torch keeps the codes of 4 bits.

torch's vectors are loaded from addresses that are multiples of the vector's size, or the process ends; tensors of a
file that was mapped, and views, begin anywhere.

Codes of 4 bits are in blocks of rows, and a block holds its columns one after the other, two codes in a byte: the code
of a row in the block's first half beside that of a row in its second half, or two neighbours. No documentation says
which, so the order is recognised: it is the one that gives back what was packed.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hf_hybrid_ssm.ops.core.custom_ops import step_op
from hf_hybrid_ssm.ops.int8_product import int8_product
from hf_hybrid_ssm.ops.int8_product.torch_backend import fitted

_INT4 = torch.ops.aten._weight_int4pack_mm_for_cpu


class _Factors(NamedTuple):
    """As `low_bit_product` takes them."""

    inputs: Tensor
    codes: Tensor
    scales: Tensor
    group_size: int


def _product(factors: _Factors) -> Tensor:
    inputs, codes, scales, group_size = factors
    if group_size == 0:
        return int8_product(inputs, codes, scales)
    return _INT4(fitted(inputs), fitted(codes), group_size, fitted(scales))


def _fake_product(factors: _Factors) -> Tensor:
    return factors.inputs.new_empty(factors.inputs.shape[0], factors.codes.shape[0])


_op = step_op("hf_hybrid_ssm::low_bit_product", _product, _fake_product, (), inputs=_Factors)


def low_bit_product(inputs: Tensor, codes: Tensor, scales: Tensor, group_size: int = 0) -> Tensor:
    """`inputs` times the weight of these codes, wherever the tensors lie: what does not fit is copied, in each call.

    Args:
        inputs: (R, I), float32, bfloat16 or float16.
        codes: with 8 bits int8 (O, I); with 4 bits uint8 (O, I / 2), packed for this processor, O a multiple of 16.
        scales: in the inputs' dtype, (O,), or with 4 bits (I / group_size, O, 2), scale and zero.
        group_size: columns of a group with 4 bits, 0 with 8.

    Returns:
        (R, O) in the inputs' dtype. Compiled and exported programs have it as one op.
    """
    return _op(_Factors(inputs, codes, scales, group_size))


class Layout(NamedTuple):
    """`block_rows` rows together; `in_halves`: a byte's codes are half a block apart, else of neighbours."""

    block_rows: int
    in_halves: bool


KNOWN = (Layout(64, True), Layout(32, True), Layout(32, False))  # AVX-512, AVX2, none of both


def pack(codes: Tensor) -> Tensor:
    """Codes 0 to 15, `(rows, columns)`, as the kernel reads them: uint8 `(rows, columns / 2)`."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)


def unpack(packed: Tensor, layout: Layout) -> Tensor:
    """The codes that were packed, uint8, transposed: `(columns, rows)`."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    block, in_halves = layout
    whole = rows // block * block
    blocks, rest = packed.flatten().split([whole * columns // 2, (rows - whole) * columns // 2])
    parts = [_codes(blocks.view(-1, columns, block // 2), in_halves)]
    if whole < rows:  # fewer rows than a block are pairs of neighbours in any layout
        parts.append(_codes(rest.view(1, columns, -1), in_halves=False))
    return torch.cat(parts, 1)


def _codes(pairs: Tensor, in_halves: bool) -> Tensor:
    """Bytes (blocks, columns, half a block) as codes (columns, rows)."""
    codes = torch.stack([pairs & 15, pairs >> 4], 2 if in_halves else 3).flatten(2)
    return codes.transpose(0, 1).flatten(1)


@torch.compiler.assume_constant_result
def known_layout() -> Layout | None:
    """That of this processor, or None if it is not among those known."""
    return _known_layout()


@functools.cache
def _known_layout() -> Layout | None:
    rows, columns = 3 * max(layout.block_rows for layout in KNOWN) + 16, 64
    codes = torch.randint(16, (rows, columns), generator=torch.Generator().manual_seed(0))
    packed = pack(codes)
    return next((layout for layout in KNOWN if torch.equal(unpack(packed, layout).T, codes)), None)
