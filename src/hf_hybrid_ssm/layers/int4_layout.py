"""The order in which torch's kernel of 4 bits keeps its codes on this processor.

Rows are in blocks, and a block holds its columns one after the other, two codes in a byte: the code of a row in the
block's first half beside that of a row in its second half, or two neighbours. What torch says of it is in no document,
so the order is recognised: it is the one that gives back what was packed.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


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
