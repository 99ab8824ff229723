"""The CUDA backend: matrix products, and Triton kernels for what lies between them.

The memory before each block of 32 tokens and the block's tokens, one below the other, are the columns of one matrix;
one product with it reads out the queries, keys and values of all tokens. So a layer's forward is a kernel for the
memories, this product and a kernel for the attention of each token, and its backward is as many kernels and two
products. Products are made in the dtype of x: memories are computed and carried in float32, what reads them is
rounded, as in the torch backend.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_hybrid_ssm.ops.core.blocks import causal_toeplitz
from hf_hybrid_ssm.ops.core.constants import constant
from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, filled
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.core.triton_helpers import dense_rows, device_guard, multiprocessors, strides, supports
from hf_hybrid_ssm.ops.implicit_attention import triton_kernels as kernels
from hf_hybrid_ssm.ops.implicit_attention.decoding import is_exact_gelu
from hf_hybrid_ssm.ops.implicit_attention.reference import ImplicitInputs
from hf_hybrid_ssm.ops.implicit_attention.torch_backend import implicit_attention_torch
from hf_hybrid_ssm.ops.legendre_memory.constants import NEGLIGIBLE, BlockOperators, block_operators, transition
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import BLOCK

__all__ = ["implicit_attention_triton", "supports"]

HELD = 2**27  # entries of queries, keys and values that a call holds for its backward; a longer one reads again
MOST_ROWS = 64  # q' that the attention kernels take
MEMORY_TILE = {"BK": 32, "BD": 32}
ATTENTION_CHANNELS = 32  # of a tile; with more, the backward of float32 rows runs out of registers


def implicit_attention_triton(inputs: ImplicitInputs) -> tuple[Tensor, Tensor | None]:
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; what the kernels do not do runs in torch."""
    x, weight, bias, collapse, collapse_bias, theta, scale, state, lengths, returns_state, form, activation = inputs
    reduced, order = weight.shape[1], inputs.order
    by_torch = form == "recurrent" or (form == "fft" and state is None) or x.shape[1] <= 2 or x.numel() == 0
    if by_torch or reduced > MOST_ROWS or not is_exact_gelu(activation):
        return implicit_attention_torch(inputs)
    with without_autocast(x.device.type):
        columns, final = _memories(x, state, lengths, order, theta, returns_state)
        table = block_table(order, theta, BLOCK, device=x.device)[:, :BLOCK].flatten(1)
        matrix = (weight.float().flatten(0, 1) @ table).view(-1, columns.shape[0]).to(x.dtype)
        zero = weight.new_zeros
        parts = (collapse, zero(3 * reduced) if bias is None else bias.flatten())
        parameters = torch.cat((*parts, zero(1) if collapse_bias is None else collapse_bias))
        y = _read_and_attend(matrix, columns, parameters, reduced, scale)
    y = y.view(x.shape[0], -1, x.shape[2])
    return y if y.shape[1] == x.shape[1] else y[:, : x.shape[1]], final if returns_state else None


def _read_and_attend(matrix: Tensor, columns: Tensor, parameters: Tensor, reduced: int, scale: float) -> Tensor:
    """(n C, D) of matrix (3 q' C, K) and columns (K, n, D)."""

    def group(matrix: Tensor, columns: Tensor, parameters: Tensor) -> Tensor:
        return _attention(matrix @ columns.flatten(1), parameters, columns.shape[2], reduced, float(scale))

    size = max(1, HELD // (matrix.shape[0] * columns.shape[2]))
    if columns.shape[1] <= size or torch.compiler.is_compiling():
        return group(matrix, columns, parameters)
    run = partial(checkpoint, group, use_reentrant=False) if torch.is_grad_enabled() else group
    return torch.cat([run(matrix, part, parameters) for part in columns.split(size, 1)])


def _rows_kept(order: int) -> int:
    """Rows of a memory among the columns: products like their axes to be multiples of eight."""
    return -(-order // 8) * 8


@constant
def block_table(order: int, theta: float, block: int) -> Tensor:
    """(q, C + 1, K) float32: the memory after t = 1 … C tokens from that before them, and from the tokens.

    Entry t - 1 is [A^t, 0, A^{t-1} B, …, B, 0, …], and the last, of no tokens, [1, 0].
    """
    operators = BlockOperators(*block_operators(order, theta, block, torch.float64))
    table = torch.zeros(order, block + 1, _rows_kept(order) + block, dtype=torch.float64)
    table[:, :block, :order] = operators.powers
    table[:, :block, -block:] = causal_toeplitz(operators.impulse).transpose(1, 2)
    table[:, block, :order] = torch.eye(order, dtype=torch.float64)
    return table.float()


@constant
def blocks_remembered(order: int, theta: float, block: int) -> int:
    """After how many blocks float32 sees nothing of a memory any more; a power of two, at most 2^16.

    In the norm of the remembered signal, of rows divided by √(2 i + 1), no step makes a memory larger.
    """
    root = (2 * torch.arange(order, dtype=torch.float64) + 1).sqrt()
    power, count = torch.linalg.matrix_power(transition(order, theta) * root / root[:, None], block), 1
    while count < 2**16 and torch.linalg.matrix_norm(power, 2) > NEGLIGIBLE:
        power, count = power @ power, 2 * count
    return count


def segments_of(programs: int, blocks: int, warm: int, processors: int) -> int:
    """Into how many segments a row is cut where processors would idle; one is twice as long as what goes before it."""
    return max(1, min(2 * processors // programs, blocks // (2 * warm)))


def memory_tile(order: int) -> dict[str, int]:
    size = min(128, max(16, triton.next_power_of_2(order)))
    return {"BM": size, **MEMORY_TILE, "num_warps": 8 if size > 64 else 4}


class _Walk(NamedTuple):
    """What both walks through the blocks are launched with."""

    grid: tuple[int]
    numbers: tuple[int, ...]
    carry: Tensor
    constants: dict


def _walk(x: Tensor, order: int, theta: float, **flags: bool) -> _Walk:
    batch, length, channels = x.shape
    tile, blocks = memory_tile(order), triton.cdiv(length, BLOCK)
    tiles, warm = triton.cdiv(channels, tile["BD"]), blocks_remembered(order, theta, BLOCK)
    per_segment = triton.cdiv(blocks, segments_of(batch * tiles, blocks, warm, multiprocessors(x.device)))
    segments = triton.cdiv(blocks, per_segment)
    height = triton.cdiv(order, tile["BM"]) * tile["BM"]
    grid = (tiles * segments * batch,)
    sizes = (length, order, _rows_kept(order) + BLOCK, channels, batch * blocks * channels)
    numbers = (*sizes, blocks, per_segment, segments, warm, tiles)
    carry = torch.empty(*grid, 2, height, tile["BD"], dtype=torch.float32, device=x.device)
    return _Walk(grid, numbers, carry, {**flags, "C": BLOCK, **tile})


class _MemoryInputs(NamedTuple):
    x: Tensor
    state: Tensor | None
    lengths: Tensor | None
    order: int
    theta: float
    needs_final: bool


def _forward_memories(inputs: _MemoryInputs) -> tuple[Tensor, Tensor]:
    """Columns (K, B J, D) in x's dtype: memory (q, and zeros) and tokens of each block; the last memory (B, q, D)."""
    x, state, lengths, order, theta, needs_final = inputs
    (x,), (columns, final) = dense_rows(x), _fake_memories(inputs)
    if state is not None:
        state = state.contiguous()
    flags = {"STATE": state is not None, "LENGTHS": lengths is not None, "FINAL": needs_final}
    walk, table = _walk(x, order, theta, **flags), block_table(order, theta, BLOCK, device=x.device)
    with device_guard(x):
        kernels.memory_kernel[walk.grid](
            x, state, lengths, table, columns, walk.carry, final, *strides(x), *walk.numbers, **walk.constants
        )
    return columns, final


def _fake_memories(inputs: _MemoryInputs) -> tuple[Tensor, Tensor]:
    x, order = inputs.x, inputs.order
    batch, length, channels = x.shape
    columns = x.new_empty(_rows_kept(order) + BLOCK, batch * -(-length // BLOCK), channels)
    shape = (batch, order, channels) if inputs.needs_final else (0,)
    return columns, x.new_empty(shape, dtype=torch.float32)


def _backward_memories(
    inputs: _MemoryInputs, gradients: Sequence, needed: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    """Of x and the state."""
    x, state, lengths, order, theta, needs_final = inputs
    dcolumns, dfinal = filled(gradients, lambda: _fake_memories(inputs))
    dx, dstate = x.new_empty(x.shape), None if state is None else state.new_empty(state.shape)
    flags = {"STATE": state is not None, "LENGTHS": lengths is not None, "FINAL": needs_final}
    walk, table = _walk(x, order, theta, **flags), block_table(order, theta, BLOCK, device=x.device)
    with device_guard(x):
        kernels.memory_gradient_kernel[walk.grid](
            dcolumns, dfinal, lengths, table, dx, walk.carry, dstate, *walk.numbers, **walk.constants
        )
    return dx, dstate


_memories = differentiable_op(
    "hf_hybrid_ssm::implicit_attention_memories", _MemoryInputs, _forward_memories, _backward_memories, _fake_memories
)


def attention_tile(rows: int, dtype: torch.dtype) -> dict:
    """As many tokens as fill sixteen or 32 rows best, or the next power of two with one."""
    fitting = [size for size in (16, 32) if size >= rows] or [MOST_ROWS]
    size = max(fitting, key=lambda size: min(16, size // rows) * rows / size)
    precision = "tf32x3" if dtype == torch.float32 else "tf32"  # which keeps what 16 bits hold
    sizes = {"R": rows, "P": size, "TOKENS": min(16, size // rows), "BD": ATTENTION_CHANNELS}
    return {**sizes, "PRECISION": precision, "num_warps": size // 8}


class _AttentionInputs(NamedTuple):
    """Rows (3 q' C, n D), parameters (4 q' + 1,), D, q' and the scale of the logits."""

    rows: Tensor
    parameters: Tensor
    channels: int
    reduced: int
    scale: float


def _forward_attention(inputs: _AttentionInputs) -> Tensor:
    """(n C, D)."""
    rows, parameters, _, count, scale = inputs
    y = _fake_attention(inputs)
    tile = attention_tile(count, rows.dtype)
    with device_guard(rows):
        kernels.attention_kernel[(triton.cdiv(len(y), tile["TOKENS"]),)](
            rows.contiguous(), parameters.contiguous(), y, *y.shape, C=BLOCK, SCALE=scale, **tile
        )
    return y


def _fake_attention(inputs: _AttentionInputs) -> Tensor:
    return inputs.rows.new_empty(inputs.rows.shape[1] // inputs.channels * BLOCK, inputs.channels)


def _backward_attention(
    inputs: _AttentionInputs, gradients: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Of the rows and the parameters."""
    rows, parameters, _, count, scale = inputs
    grad_y = gradients[0].contiguous()
    drows, sums = rows.new_empty(rows.shape), grad_y.new_empty(len(grad_y), 5 * count, dtype=torch.float32)
    tile = attention_tile(count, rows.dtype)
    with device_guard(rows):
        kernels.attention_gradient_kernel[(triton.cdiv(len(grad_y), tile["TOKENS"]),)](
            rows.contiguous(), parameters.contiguous(), grad_y, drows, sums, *grad_y.shape,
            C=BLOCK, SCALE=scale, **tile,
        )  # fmt: skip
    return drows, sums.sum(0)[: 4 * count + 1].to(parameters.dtype)


_attention = differentiable_op(
    "hf_hybrid_ssm::implicit_attention_rows",
    _AttentionInputs,
    _forward_attention,
    _backward_attention,
    _fake_attention,
)
