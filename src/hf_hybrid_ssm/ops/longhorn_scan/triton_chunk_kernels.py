"""The Triton kernel of the Longhorn scan's gradients in chunks of four tokens, on matrix products.

Four steps of the recurrence, written out, are a sum over the subsets of their tokens, f: with A_f, the product of
Delta over f, and P_f, that of -k², a state becomes h + (sum over f of A_f P_f) h + sum over f of F_f W_f. The first
factors belong to a channel, the second to a state, so that both sums are products of matrices, and so are the sums
over channels that the gradients of k and q take. `docs/tensor_core_scan.md` writes them down.

Token t belongs to f if its bit t is set. Entry r = 2^(t + 1) + f of what is read out is what token t, the highest of
them, sees of the tokens f, which come no later: 2 + 4 + 8 + 16 entries in 32 places, the first two of them empty.

A state and a key are scaled so that no product overflows: k' = r k, Delta' = Delta / r², x' = r x with r = 1 / |k| for
keys longer than 1. As the result does not depend on r, no gradient goes through it. States lie [N, BD] here.
"""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import exponential, kernel, load, program_coords, reciprocal, tokens_at
from hf_hybrid_ssm.ops.longhorn_scan.triton_kernels import compute_delta

T = tl.constexpr(4)  # tokens of a chunk
ROWS = tl.constexpr(8)  # tokens of a step of what goes before and after
SUBSETS, HEAP = tl.constexpr(16), tl.constexpr(32)


@triton.jit
def product(subset, rows):
    """The product of the rows of a subset's tokens: [K, 1] and four of [1, M] → [K, M]."""
    total = tl.where((subset & 1) != 0, rows[0], 1.0)
    for i in tl.static_range(1, 4):
        total = total * tl.where(((subset >> i) & 1) != 0, rows[i], 1.0)
    return total


@triton.jit
def of_first(subset, rows):
    """The row of a subset's first token, 0 of none."""
    found = tl.where(subset == 8, rows[3], 0.0)
    for i in tl.static_range(2, -1, -1):
        found = tl.where(((subset >> i) & 1) != 0, rows[i], found)
    return found


@triton.jit
def of_reader(entry, rows):
    """The row of the token that reads an entry out, 0 of none."""
    found = tl.where(entry >= 4, rows[1], tl.where(entry >= 2, rows[0], 0.0))
    return tl.where(entry >= 16, rows[3], tl.where(entry >= 8, rows[2], found))


@triton.jit
def heap_subset(entry):
    """What an entry's reader sees the work of."""
    low = tl.where(entry >= 4, entry & 3, entry & 1)
    return tl.where(entry >= 16, entry & 15, tl.where(entry >= 8, entry & 7, low))


@triton.jit
def reader(entry):
    return tl.where(entry >= 16, 3, tl.where(entry >= 8, 2, tl.where(entry >= 4, 1, tl.where(entry >= 2, 0, -1))))


@triton.jit
def first_of(subset):
    """A subset's first token, 4 of none."""
    odd = tl.where((subset & 2) != 0, 1, tl.where((subset & 4) != 0, 2, tl.where((subset & 8) != 0, 3, 4)))
    return tl.where((subset & 1) != 0, 0, odd)


@triton.jit
def multiply(a, b, total):
    """total + a b, of numbers with the eleven bits of tf32, which keep what 16 bits hold."""
    return tl.dot(a, b, total, input_precision="tf32")


@triton.jit
def parts_of(tile, M: tl.constexpr):
    """The first three of four parts of [16, M], each [4, M]."""
    pairs = tl.reshape(tl.permute(tl.reshape(tile, [4, T, M]), (1, 2, 0)), [T, M, 2, 2])
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, _ = tl.split(odd)
    return first, second, third


@triton.jit
def load_rows(pointers, step):
    """Four rows [1, M], or four numbers."""
    return tl.load(pointers), tl.load(pointers + step), tl.load(pointers + 2 * step), tl.load(pointers + 3 * step)


@triton.jit
def longer(norm):
    """1 / r², from |k|²; the bounds keep what is no number from products with 0."""
    return tl.minimum(tl.maximum(norm, 1.0), 1e37)


@triton.jit
def scaled_keys(keys, norms, at, n, N: tl.constexpr):
    """r k of four tokens, and -r² k²."""
    k, s = load_rows(keys + at * N + n, N), load_rows(norms + at, 1)
    first, second = k[0] * tl.rsqrt(longer(s[0])), k[1] * tl.rsqrt(longer(s[1]))
    third, fourth = k[2] * tl.rsqrt(longer(s[2])), k[3] * tl.rsqrt(longer(s[3]))
    return (first, second, third, fourth), (-first * first, -second * second, -third * third, -fourth * fourth)


@triton.jit
def document_numbers(keeps, at):
    """Whether the state that enters reaches each of four tokens, and how many documents began since the first."""
    keep = load_rows(keeps + at, 1)
    one, two = keep[0] * keep[1], keep[0] * keep[1] * keep[2]
    second, third = 1.0 - keep[1], 2.0 - keep[1] - keep[2]
    return (keep[0], one, two, two * keep[3]), (0.0, second, third, third + 1.0 - keep[3])


@triton.jit
def of_line(token, rows):
    """The row of a line's token."""
    found = tl.where(token == 2, rows[2], rows[3])
    return tl.where(token == 0, rows[0], tl.where(token == 1, rows[1], found))


@triton.jit
def places(tile, d, channels, n, num_states, WIDTH: tl.constexpr, N: tl.constexpr):
    """Of states [N, BD]: which there are, and where they lie in (D, N) and in a checkpoint (D / WIDTH, N, WIDTH)."""
    in_tile = (n < num_states)[:, None] & (d < channels)[None, :]
    in_checkpoint = ((d // WIDTH) * (num_states * WIDTH) + d % WIDTH)[None, :] + n[:, None] * WIDTH
    return in_tile, n[:, None] + d[None, :] * num_states, in_checkpoint


@triton.jit
def hold_tokens(
    signals, norms, bias, held, row, block, num_blocks, d, channels, L,
    HAS_VALUES: tl.constexpr, HAS_GRADIENTS: tl.constexpr, HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of each token of a block: Delta and x, scaled with r, and the gradient of what the states give."""
    i, is_channel = tl.arange(0, ROWS)[:, None], (d < channels)[None, :]
    for part in tl.range(0, BLOCK // ROWS, num_stages=STAGES):
        first = block * BLOCK + part * ROWS + row * 0  # 64-bit
        real = (i < L - first) & is_channel
        at = held + (part * ROWS + i) * (3 * BD)
        norm = tl.load(norms + row * num_blocks * BLOCK + first + i)
        if HAS_VALUES:
            x_t = tokens_at(signals[0], row, first, i, d, real)
            tl.store(at + BD, x_t * tl.rsqrt(longer(norm)))
        logit = tokens_at(signals[1], row, first, i, d, real)
        if HAS_GRADIENTS:
            g_t = tokens_at(signals[3], row, first, i, d, real)
            if HAS_GATE:
                z_t = tokens_at(signals[2], row, first, i, d, real)
                g_t = g_t * z_t * reciprocal(1.0 + exponential(-z_t))
            tl.store(at + 2 * BD, g_t)
        delta, _ = compute_delta(logit + bias, norm)
        tl.store(at, delta * longer(norm))


@triton.jit
def advance(h, keys, norms, keeps, shared, taken, n, HAS_DOCUMENTS: tl.constexpr, N: tl.constexpr, BD: tl.constexpr):
    """The states after a chunk, from those before it; M, where a state becomes h + M h + ..., and whether any of it
    reaches the chunk's end."""
    f = tl.arange(0, SUBSETS)[:, None]
    deltas, values = load_rows(taken, 3 * BD), load_rows(taken + BD, 3 * BD)
    k, minus = scaled_keys(keys, norms, shared, n[None, :], N)
    A = tl.where(f == 0, 0.0, product(f, deltas))
    F = A * of_first(f, values)
    P, W = product(f, minus), product(f & (f - 1), minus) * of_first(f, k)
    reaches = 1.0
    if HAS_DOCUMENTS:
        entered, number = document_numbers(keeps, shared)
        W = tl.where(of_first(f, number) == number[3], W, 0.0)
        reaches = entered[3]
        h = h * reaches
    M = multiply(tl.trans(P), A, tl.zeros([N, BD], tl.float32))
    return multiply(tl.trans(W), F, h + M * h), M, reaches


@triton.jit
def hold_states(
    h, keys, norms, keeps, held, own, begin, n,
    HAS_DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The states before each chunk of a block, from those before the block."""
    for sub in tl.range(0, BLOCK // T, num_stages=1):
        tl.store(own + sub * (N * BD), h)
        taken = held + sub * (T * 3 * BD)
        h, _, _ = advance(h, keys, norms, keeps, begin + sub * T, taken, n, HAS_DOCUMENTS, N, BD)


@triton.jit
def sum_places():
    """Rows 4 i + t of a sum: its kind i, of token t. Which subsets and entries each adds up, and what comes before."""
    line = tl.arange(0, 16)[:, None]
    kind, token = line // 4, line % 4
    subset, entry = tl.arange(0, SUBSETS)[None, :], tl.arange(0, HEAP)[None, :]
    holds = tl.where(kind == 0, (subset >> token) & 1, tl.where((kind == 2) & (first_of(subset) == token), 1, 0))
    heap_holds = (heap_subset(entry) >> token) & 1
    reads = tl.where((kind == 1) & (reader(entry) == token), 1, 0)
    adds, heap_adds = holds.to(tl.float32), tl.where(kind == 0, heap_holds, reads).to(tl.float32)
    comes_before = (kind == 1) & (subset < (2 << token)) & (subset > 0)
    return kind, token, adds, heap_adds, comes_before


@triton.jit
def product_gradients(
    grad, met, keys, queries, norms, keeps, taken, shared, n, kind, token, comes_before,
    HAS_DOCUMENTS: tl.constexpr, N: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Of a chunk that met states and is left with the gradient `grad`: the gradient before it, and of its products
    (of channels: dMP, dF, Z, y; of states: dP, dW, dR, dq)."""
    f, r, subset = tl.arange(0, SUBSETS)[:, None], tl.arange(0, HEAP)[:, None], tl.arange(0, SUBSETS)[None, :]
    deltas, values = load_rows(taken, 3 * BD), load_rows(taken + BD, 3 * BD)
    grads = load_rows(taken + 2 * BD, 3 * BD)
    k, minus = scaled_keys(keys, norms, shared, n[None, :], N)
    q = load_rows(queries + shared * N + n[None, :], N)
    A = tl.where(f == 0, 0.0, product(f, deltas))
    F, B = A * of_first(f, values), product(heap_subset(r), deltas) * of_reader(r, grads)
    GY, Q = tl.where(kind == 1, of_line(token, grads), 0.0), tl.where(kind == 1, of_line(token, q), 0.0)
    P, W = product(f, minus), product(f & (f - 1), minus) * of_first(f, k)
    reach, last_W, decayed = tl.where(comes_before, 1.0, 0.0), W, grad
    if HAS_DOCUMENTS:
        entered, number = document_numbers(keeps, shared)
        reach = tl.where(of_first(subset, number) == of_line(token, number), reach, 0.0)
        is_last = of_first(f, number) == number[3]
        last_W = tl.where(is_last, W, 0.0)
        q = (q[0] * entered[0], q[1] * entered[1], q[2] * entered[2], q[3] * entered[3])
        decayed = grad * entered[3]
    R, dM = product(heap_subset(r), minus) * of_reader(r, q), decayed * met
    dMP = multiply(P, dM, tl.zeros([SUBSETS, BD], tl.float32))
    dP = multiply(A, tl.trans(dM), tl.zeros([SUBSETS, N], tl.float32))
    Z = multiply(R, met, tl.zeros([HEAP, BD], tl.float32))
    dR = multiply(B, tl.trans(met), tl.zeros([HEAP, N], tl.float32))
    G = reach * multiply(Q, tl.trans(W), tl.zeros([16, SUBSETS], tl.float32))
    dG = reach * multiply(GY, tl.trans(F), tl.zeros([16, SUBSETS], tl.float32))
    dF = multiply(last_W, grad, tl.zeros([SUBSETS, BD], tl.float32))
    dF = multiply(tl.trans(G), GY, dF)
    dW = multiply(F, tl.trans(grad), tl.zeros([SUBSETS, N], tl.float32))
    if HAS_DOCUMENTS:
        dW = tl.where(is_last, dW, 0.0)
    dW = multiply(tl.trans(dG), Q, dW)
    M = multiply(tl.trans(P), A, tl.zeros([N, BD], tl.float32))
    grad = multiply(tl.trans(R), B, decayed + M * decayed)
    y = multiply(G, F, tl.zeros([16, BD], tl.float32))
    dq_t = multiply(dG, W, tl.zeros([16, N], tl.float32))
    return grad, dMP, dF, Z, y, dP, dW, dR, dq_t


@triton.jit
def channel_sums(dMP, dF, Z, y, taken, kind, adds, heap_adds, HAS_GATE: tl.constexpr, BD: tl.constexpr):
    """Of each token and channel, by kind: Delta times its gradient, what the states gave, the gradient of x."""
    f, r = tl.arange(0, SUBSETS)[:, None], tl.arange(0, HEAP)[:, None]
    deltas, values = load_rows(taken, 3 * BD), load_rows(taken + BD, 3 * BD)
    grads = load_rows(taken + 2 * BD, 3 * BD)
    A = tl.where(f == 0, 0.0, product(f, deltas))
    sums = multiply(adds, A * (dMP + of_first(f, values) * dF), tl.zeros([16, BD], tl.float32))
    value = multiply(adds, A * dF, tl.zeros([16, BD], tl.float32))
    Z = product(heap_subset(r), deltas) * Z
    sums = multiply(heap_adds, of_reader(r, grads) * Z, sums)
    if HAS_GATE:
        y = multiply(heap_adds, Z, y)
    return tl.where(kind == 0, sums, tl.where(kind == 1, y, value))


@triton.jit
def state_sums(
    dP, dW, dR, dq_t, keys, queries, norms, keeps, shared, n, kind, adds, heap_adds,
    HAS_DOCUMENTS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """What all channels of the tile give to dk and dq of each token, [4, N]."""
    f, r, t = tl.arange(0, SUBSETS)[:, None], tl.arange(0, HEAP)[:, None], tl.arange(0, T)
    k, minus = scaled_keys(keys, norms, shared, n[None, :], N)
    q = load_rows(queries + shared * N + n[None, :], N)
    if HAS_DOCUMENTS:
        entered, _ = document_numbers(keeps, shared)
        q = (q[0] * entered[0], q[1] * entered[1], q[2] * entered[2], q[3] * entered[3])
    dW = product(f & (f - 1), minus) * dW
    squares = product(f, minus) * dP + of_first(f, k) * dW
    squares = multiply(adds, squares, tl.zeros([16, N], tl.float32))
    direct = multiply(adds, dW, tl.zeros([16, N], tl.float32))
    dR = product(heap_subset(r), minus) * dR
    squares = multiply(heap_adds, of_reader(r, q) * dR, squares)
    if HAS_DOCUMENTS:
        dR = dR * of_reader(r, entered)
    dq_t = multiply(heap_adds, dR, dq_t)
    squares, dq_t, direct = parts_of(tl.where(kind == 0, squares, tl.where(kind == 1, dq_t, direct)), N)
    key = tl.load(keys + shared * N + t[:, None] * N + n[None, :])
    direct = 0.5 * direct * tl.rsqrt(longer(tl.load(norms + shared + t)))[:, None]
    some = tl.abs(key) > 1e-18
    return tl.where(some, squares * reciprocal(tl.where(some, key, 1.0)) - direct, direct), dq_t


@triton.jit
def finish_tokens(
    signals, norms, bias, through, results, dx, dlogit, dz, norm_parts, dbias, dskip, row, parts, block, num_blocks,
    d, channels, L,
    HAS_GATE: tl.constexpr, BLOCK: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of each token of a block from its sums, and those of bias and skip so far."""
    i, is_channel = tl.arange(0, ROWS)[:, None], (d < channels)[None, :]
    for part in tl.range(0, BLOCK // ROWS, num_stages=STAGES):
        first = block * BLOCK + part * ROWS + row * 0  # 64-bit
        shared = row * num_blocks * BLOCK + first
        real = (i < L - first) & is_channel
        x_t, logit = tokens_at(signals[0], row, first, i, d, real), tokens_at(signals[1], row, first, i, d, real)
        g_t = tokens_at(signals[3], row, first, i, d, real)
        norm = tl.load(norms + shared + i)
        delta, e = compute_delta(logit + bias, norm)
        done = results + (part * ROWS + i) * (3 * BD)
        delta_ddelta, dvalue = tl.load(done), tl.load(done + 2 * BD)
        at = (row * L + first) * channels + (i * channels + d[None, :])
        if HAS_GATE:
            z_t = tokens_at(signals[2], row, first, i, d, real)
            open_ = reciprocal(1.0 + exponential(-z_t))
            dz_t = g_t * open_ * (1.0 + z_t * (1.0 - open_)) * (tl.load(done + BD) + through * x_t)
            tl.store(dz + at, dz_t, mask=real)
            g_t = g_t * z_t * open_
        dlogit_t = delta_ddelta * delta * e
        tl.store(dx + at, g_t * through + dvalue * tl.rsqrt(longer(norm)), mask=real)
        tl.store(dlogit + at, dlogit_t, mask=real)
        dbias += tl.sum(dlogit_t, 0)
        dskip += tl.sum(g_t * x_t, 0)
        tl.store(norm_parts + parts + shared + tl.arange(0, ROWS), tl.sum(delta * delta_ddelta, 1))
    return dbias, dskip


@kernel
def chunk_backward_kernel(
    x, beta_logit, z, grad_o, keys, queries, norms, keeps, beta_bias, skip, checkpoints, grad_states, scratch,
    dx, dlogit, dz, dq_parts, dk_parts, norm_parts, dbias_parts, dskip_parts, dinitial,
    x_row, x_step, logit_row, logit_step, z_row, z_step, g_row, g_step,
    L, channels, num_states, tiles, num_splits, num_blocks, blocks_per_split, lane,
    rows,
    HAS_BIAS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    HAS_GRAD_STATES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `backward_kernel`: all gradients of one split of one row for BD channels, blocks from last to first."""
    SUBS: tl.constexpr = BLOCK // T
    tile, split, row = program_coords(tl.program_id(0), tiles, num_splits)
    d, n, size = tile * BD + tl.arange(0, BD), tl.arange(0, N), num_states * channels
    signals = ((x, x_row, x_step), (beta_logit, logit_row, logit_step), (z, z_row, z_step), (grad_o, g_row, g_step))
    held = scratch + tl.program_id(0).to(tl.int64) * (SUBS * N + 6 * BLOCK) * BD + tl.arange(0, BD)[None, :]
    results, own = held + 3 * BLOCK * BD, held + 6 * BLOCK * BD + n[:, None] * BD
    in_tile, in_states, in_checkpoint = places(tile, d, channels, n, num_states, WIDTH, N)
    in_parts = tl.arange(0, T)[:, None] * N + n[None, :]
    bias = load(beta_bias + d, d < channels) if HAS_BIAS else 0.0
    through = load(skip + d, d < channels) if HAS_SKIP else 0.0
    kind, token, adds, heap_adds, comes_before = sum_places()
    grad = tl.zeros([N, BD], tl.float32)
    if HAS_GRAD_STATES:
        grad = tl.load(grad_states + (row * num_splits + split) * size + in_states, mask=in_tile, other=0.0)
    dbias, dskip = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    first_block, last_block = split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)
    parts = tile.to(tl.int64) * rows * num_blocks * BLOCK
    for turn in range(0, last_block - first_block):
        block = last_block - 1 - turn
        begin = (row * num_blocks + block) * BLOCK
        hold_tokens(
            signals, norms, bias, held, row, block, num_blocks, d, channels, L, True, True, HAS_GATE, BLOCK, BD, STAGES
        )
        tl.debug_barrier()  # the lanes that read below may not be those that wrote
        here = checkpoints + (row * num_blocks + block) * tl.cdiv(channels, WIDTH) * num_states * WIDTH
        h = tl.load(here + in_checkpoint, mask=in_tile, other=0.0)
        hold_states(h, keys, norms, keeps, held, own, begin, n, HAS_DOCUMENTS, BLOCK, N, BD)
        tl.debug_barrier()
        for back in tl.range(0, SUBS, num_stages=1):
            sub = SUBS - 1 - back
            shared, taken = begin + sub * T, held + sub * (T * 3 * BD)
            grad, dMP, dF, Z, y, dP, dW, dR, dq_t = product_gradients(
                grad, tl.load(own + sub * (N * BD)), keys, queries, norms, keeps, taken, shared, n,
                kind, token, comes_before, HAS_DOCUMENTS, N, BD,
            )  # fmt: skip
            if N > 32:  # what follows is loaded once more, or it would stay in registers
                tl.debug_barrier()
            sums = channel_sums(dMP, dF, Z, y, taken, kind, adds, heap_adds, HAS_GATE, BD)
            tl.store(results + (sub * (T * 3) + token * 3 + kind) * BD, sums, mask=kind < 3)
            dk_t, dq_t = state_sums(
                dP, dW, dR, dq_t, keys, queries, norms, keeps, shared, n, kind, adds, heap_adds, HAS_DOCUMENTS, N
            )
            tl.store(dk_parts + (parts + shared) * N + in_parts, dk_t)
            tl.store(dq_parts + (parts + shared) * N + in_parts, dq_t)
        tl.debug_barrier()
        dbias, dskip = finish_tokens(
            signals, norms, bias, through, results, dx, dlogit, dz, norm_parts, dbias, dskip, row, parts, block,
            num_blocks, d, channels, L, HAS_GATE, BLOCK, BD, STAGES,
        )  # fmt: skip
        tl.debug_barrier()  # the next block overwrites what this one holds
    summed = (row * num_splits + split) * channels + d
    if HAS_BIAS:
        tl.store(dbias_parts + summed, dbias, mask=d < channels)
    if HAS_SKIP:
        tl.store(dskip_parts + summed, dskip, mask=d < channels)
    if split == 0:
        tl.store(dinitial + row * size + in_states, grad, mask=in_tile)


def held_rows(block: int, width: int) -> int:
    """Rows of channels that a program holds in memory: the states before each chunk of a block, and six of a token."""
    return block // T.value * width + 6 * block
