"""Triton kernels of the first pass over a row that is cut, in chunks of four tokens; see `triton_chunk_kernels`."""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import kernel, load, program_coords
from hf_hybrid_ssm.ops.longhorn_scan.triton_chunk_kernels import (
    HEAP,
    SUBSETS,
    advance,
    document_numbers,
    heap_subset,
    hold_tokens,
    load_rows,
    multiply,
    of_reader,
    places,
    product,
    scaled_keys,
)

T = tl.constexpr(4)  # tokens of a chunk


@triton.jit
def retreat(
    grad, keys, queries, norms, keeps, shared, taken, n,
    HAS_DOCUMENTS: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """As `advance`, of the gradient: what is left of it before a chunk, from what there is after it."""
    f, r = tl.arange(0, SUBSETS)[:, None], tl.arange(0, HEAP)[:, None]
    deltas, grads = load_rows(taken, 3 * BD), load_rows(taken + 2 * BD, 3 * BD)
    _, minus = scaled_keys(keys, norms, shared, n[None, :], N)
    q = load_rows(queries + shared * N + n[None, :], N)
    A, B = tl.where(f == 0, 0.0, product(f, deltas)), product(heap_subset(r), deltas) * of_reader(r, grads)
    reaches = 1.0
    if HAS_DOCUMENTS:
        entered, _ = document_numbers(keeps, shared)
        q = (q[0] * entered[0], q[1] * entered[1], q[2] * entered[2], q[3] * entered[3])
        reaches = entered[3]
        grad = grad * reaches
    R = product(heap_subset(r), minus) * of_reader(r, q)
    M = multiply(tl.trans(product(f, minus)), A, tl.zeros([N, BD], tl.float32))
    return multiply(tl.trans(R), B, grad + M * grad), M, reaches


@kernel
def forward_chunk_summary_kernel(
    x, beta_logit, keys, norms, keeps, beta_bias, products, ends, scratch,
    x_row, x_step, logit_row, logit_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of one split: the product of its decays and its end state if it started from zero, both (B, splits, D, N)."""
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d, n = tile * BD + tl.arange(0, BD), tl.arange(0, N)
    signals = ((x, x_row, x_step), (beta_logit, logit_row, logit_step))
    held = scratch + tl.program_id(0).to(tl.int64) * (3 * BLOCK * BD) + tl.arange(0, BD)[None, :]
    bias = load(beta_bias + d, d < channels) if HAS_BIAS else 0.0
    h, decay = tl.zeros([N, BD], tl.float32), tl.full([N, BD], 1.0, tl.float32)
    for block in range(split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)):
        begin = (row * num_blocks + block) * BLOCK
        hold_tokens(
            signals, norms, bias, held, row, block, num_blocks, d, channels, L, True, False, False, BLOCK, BD, STAGES
        )
        tl.debug_barrier()  # the lanes that read below may not be those that wrote
        for sub in tl.range(0, BLOCK // T, num_stages=1):
            taken = held + sub * (T * 3 * BD)
            h, M, reaches = advance(h, keys, norms, keeps, begin + sub * T, taken, n, HAS_DOCUMENTS, N, BD)
            decay = (decay + M * decay) * reaches
        tl.debug_barrier()  # the next block overwrites what this one holds
    in_tile, in_states, _ = places(tile, d, channels, n, num_states, 1, N)
    here = (row * num_splits + split) * num_states * channels + in_states
    tl.store(products + here, decay, mask=in_tile)
    tl.store(ends + here, h, mask=in_tile)


@kernel
def backward_chunk_summary_kernel(
    beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, products, ends, scratch,
    logit_row, logit_step, z_row, z_step, g_row, g_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `forward_chunk_summary_kernel`, for the gradient that runs backwards through time."""
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d, n = tile * BD + tl.arange(0, BD), tl.arange(0, N)
    logits = (beta_logit, logit_row, logit_step)
    signals = (logits, logits, (z, z_row, z_step), (grad_o, g_row, g_step))
    held = scratch + tl.program_id(0).to(tl.int64) * (3 * BLOCK * BD) + tl.arange(0, BD)[None, :]
    bias = load(beta_bias + d, d < channels) if HAS_BIAS else 0.0
    grad, decay = tl.zeros([N, BD], tl.float32), tl.full([N, BD], 1.0, tl.float32)
    first_block, last_block = split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)
    for turn in range(0, last_block - first_block):
        block = last_block - 1 - turn
        begin = (row * num_blocks + block) * BLOCK
        hold_tokens(
            signals, norms, bias, held, row, block, num_blocks, d, channels, L, False, True, HAS_GATE, BLOCK, BD,
            STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # the lanes that read below may not be those that wrote
        for back in tl.range(0, BLOCK // T, num_stages=1):
            sub = BLOCK // T - 1 - back
            taken = held + sub * (T * 3 * BD)
            grad, M, reaches = retreat(
                grad, keys, queries, norms, keeps, begin + sub * T, taken, n, HAS_DOCUMENTS, N, BD
            )
            decay = (decay + M * decay) * reaches
        tl.debug_barrier()  # the next block overwrites what this one holds
    in_tile, in_states, _ = places(tile, d, channels, n, num_states, 1, N)
    here = (row * num_splits + split) * num_states * channels + in_states
    tl.store(products + here, decay, mask=in_tile)
    tl.store(ends + here, grad, mask=in_tile)


def held_rows(block: int) -> int:
    """Rows of channels that a program holds in memory: three of each token of a block."""
    return 3 * block
