"""Triton kernels of implicit attention: the memories between blocks of tokens, and the attention of each token.

A program of the first pair walks through the blocks of a row with BD channels. A block of C tokens takes the memory on
by one product of matrices; the memory before it is too large for registers (q = 256: 256 rows), so it goes from block
to block through `carry`, a place of the program's own in the caches. Of the last block of a row only the real tokens
count, and after it the memory stays as it is: `table` holds a matrix for each number of tokens. A row may be cut into
segments; as the memory forgets, a segment starts from zero some blocks before its own.

A program of the second pair has the P rows of a few tokens' queries, keys and values, R of each token: one product
gives the logits of all of them, of which those among the rows of one token count. The backward computes everything
again from what was read out.
"""

import triton
import triton.language as tl

from hf_hybrid_ssm.ops.core.triton_helpers import kernel, load


@triton.jit
def program_coords(tiles, segments, per_segment, num_blocks):
    """Tile, row, and the first and last (exclusive) block that the program is to give."""
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    first = (rest % segments) * per_segment
    return tile, (rest // segments).to(tl.int64), first, tl.minimum(first + per_segment, num_blocks)


@triton.jit
def ends(lengths, row, L, num_blocks, LENGTHS: tl.constexpr, C: tl.constexpr):
    """The row's real tokens, and the block with the last of them."""
    tokens = tl.load(lengths + row).to(tl.int32) if LENGTHS else L
    return tokens, tl.minimum(tl.maximum(tokens - 1, 0) // C, num_blocks - 1)


@triton.jit
def step_matrix(table, tokens, j, padded, C: tl.constexpr):
    """What block j does to the memory: that of its tokens, and the identity, which is the last, if it has none."""
    real = tl.minimum(tl.maximum(tokens - j * C, 0), C)
    return table + tl.where(real == 0, C, real - 1) * padded


@kernel
def memory_kernel(
    x, state, lengths, table, columns, carry, final, x_row, x_step, L, size, padded, channels, total_channels,
    num_blocks, per_segment, segments, warm, tiles,
    STATE: tl.constexpr, LENGTHS: tl.constexpr, FINAL: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """columns[:, n]: the memory (`size` rows, and zeros) before block n, and below it the block's C tokens."""
    tile, row, first, last = program_coords(tiles, segments, per_segment, num_blocks)
    tokens, end = ends(lengths, row, L, num_blocks, LENGTHS, C)
    d, m, k, c = tile * BD + tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, C)
    is_channel, lane = (d < channels)[None, :], tl.arange(0, BD)[None, :]
    kept, height = padded - C, tl.cdiv(size, BM) * BM  # rows of the memory in `columns` and in `carry`
    own = carry + tl.program_id(0).to(tl.int64) * 2 * height * BD + lane
    target, number = columns + d[None, :], row * num_blocks
    start = tl.maximum(first - warm, 0)
    for begin in range(0, height, BM):
        i = begin + m
        s = tl.zeros([BM, BD], tl.float32)
        if STATE:
            at = state + (row * size + i.to(tl.int64))[:, None] * channels + d[None, :]
            s = load(at, is_channel & (i < tl.where(start == 0, size, 0))[:, None])
        tl.store(own + i[:, None] * BD, s)
        at = target + i.to(tl.int64)[:, None] * total_channels + (number + first) * channels
        tl.store(at, s, mask=is_channel & (i < tl.where(start == first, kept, 0))[:, None])
    tl.debug_barrier()
    for j in range(start, last):
        here = (j - start) % 2
        matrix = step_matrix(table, tokens, j, padded, C)
        t = row * 0 + j * C + c
        inputs = tl.load(
            x + row * x_row + t[:, None] * x_step + d[None, :], mask=(t < L)[:, None] & is_channel, other=0.0
        )
        below = target + (kept + c).to(tl.int64)[:, None] * total_channels + (number + j) * channels
        tl.store(below, inputs, mask=is_channel & (c < tl.where(j >= first, C, 0))[:, None])
        for begin in range(0, height, BM):
            i = begin + m
            of_row = matrix + (i * ((C + 1) * padded))[:, None]
            is_row = (i < size)[:, None]
            total = tl.zeros([BM, BD], tl.float32)
            for entry in range(0, size, BK):
                row_of = entry + k
                is_entry = row_of < size
                a = tl.load(of_row + row_of[None, :], mask=is_row & is_entry[None, :], other=0.0)
                s = tl.load(own + (here * height + row_of)[:, None] * BD, mask=is_entry[:, None], other=0.0)
                total = tl.dot(a, s, total, input_precision="tf32x3")
            a = tl.load(of_row + kept + c[None, :], mask=is_row, other=0.0)
            total = tl.dot(a, inputs.to(tl.float32), total, input_precision="tf32x3")
            tl.store(own + ((1 - here) * height + i)[:, None] * BD, total)
            at = target + i.to(tl.int64)[:, None] * total_channels + (number + j + 1) * channels
            is_wanted = (j + 1 >= first) & (j + 1 < last)
            tl.store(at, total, mask=is_channel & (i < tl.where(is_wanted, kept, 0))[:, None])
        tl.debug_barrier()
    if FINAL:
        here = (last - start) % 2
        is_last = (first <= end) & (end < last)
        for begin in range(0, height, BM):
            i = begin + m
            s = tl.load(own + (here * height + i)[:, None] * BD)
            at = final + (row * size + i.to(tl.int64))[:, None] * channels + d[None, :]
            tl.store(at, s, mask=is_channel & (i < tl.where(is_last, size, 0))[:, None])


@kernel
def memory_gradient_kernel(
    grad_columns, grad_final, lengths, table, dx, carry, dstate, L, size, padded, channels, total_channels,
    num_blocks, per_segment, segments, warm, tiles,
    STATE: tl.constexpr, LENGTHS: tl.constexpr, FINAL: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The same walk from the row's end, by the transposed matrices: the gradients of tokens and initial memory."""
    tile, row, first, last = program_coords(tiles, segments, per_segment, num_blocks)
    tokens, end = ends(lengths, row, L, num_blocks, LENGTHS, C)
    d, m, k = tile * BD + tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BK)
    is_channel, lane = (d < channels)[None, :], tl.arange(0, BD)[None, :]
    kept, height = padded - C, tl.cdiv(size, BM) * BM
    own = carry + tl.program_id(0).to(tl.int64) * 2 * height * BD + lane
    of_final = grad_final + row * size * channels + d[None, :]
    source, number = grad_columns + d[None, :], row * num_blocks
    start = tl.minimum(last + warm, num_blocks)  # after the first block of the walk
    for begin in range(0, height, BM):
        i = begin + m
        g = tl.zeros([BM, BD], tl.float32)
        if FINAL:
            is_after = tl.where(end == start - 1, size, 0)
            g = load(of_final + i.to(tl.int64)[:, None] * channels, is_channel & (i < is_after)[:, None])
        tl.store(own + i[:, None] * BD, g)
    tl.debug_barrier()
    for step in range(0, start - first):
        j, here = start - 1 - step, step % 2
        matrix = step_matrix(table, tokens, j, padded, C)
        for begin in range(0, padded, BM):
            i = begin + m
            of_row = matrix + i[:, None]
            at = source + i.to(tl.int64)[:, None] * total_channels + (number + j) * channels
            total = load(at, is_channel & (i < padded)[:, None])
            for entry in range(0, size, BK):
                row_of = entry + k
                is_entry = row_of < size
                entries = of_row + (row_of * ((C + 1) * padded))[None, :]
                a = tl.load(entries, mask=(i < padded)[:, None] & is_entry[None, :], other=0.0)
                g = tl.load(own + (here * height + row_of)[:, None] * BD, mask=is_entry[:, None], other=0.0)
                total = tl.dot(a, g, total, input_precision="tf32x3")
            t = row * 0 + j * C + i - kept
            is_token = (i >= kept) & (t < tl.where(j < last, L, 0)) & (i < padded)
            tl.store(dx + (row * L + t)[:, None] * channels + d[None, :], total, mask=is_token[:, None] & is_channel)
            if FINAL:
                is_after = tl.where(end == j - 1, size, 0)
                total += load(of_final + i.to(tl.int64)[:, None] * channels, is_channel & (i < is_after)[:, None])
            tl.store(own + ((1 - here) * height + i)[:, None] * BD, total, mask=(i < size)[:, None])
        tl.debug_barrier()
    if STATE:
        here = (start - first) % 2
        for begin in range(0, height, BM):
            i = begin + m
            is_row = i < tl.where(first == 0, size, 0)
            g = tl.load(own + (here * height + i)[:, None] * BD, mask=is_row[:, None], other=0.0)
            at = dstate + (row * size + i.to(tl.int64))[:, None] * channels + d[None, :]
            tl.store(at, g, mask=is_row[:, None] & is_channel)


@triton.jit
def gelu(x):
    """The exact one, and its derivative."""
    below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    return x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327


@triton.jit
def activated(rows, at, bias, inside):
    """[P, BD] of queries, keys or values, 0 outside, and the derivative of the activation."""
    value, derivative = gelu(load(rows + at, inside) + bias[:, None])
    return tl.where(inside, value, 0.0), derivative


@triton.jit
def whose(size, channels, R: tl.constexpr, C: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr):
    """Of P places: which token of the program, which of its R rows, its number, where its query lies, if there is one.

    Row i of token c of block n lies at ((i C) + c) columns + n channels, those of keys and values R C columns on.
    """
    number = tl.arange(0, P)
    token, i = number // R, number % R
    t = tl.program_id(0).to(tl.int64) * TOKENS + token
    columns = tl.cast(size // C, tl.int64) * channels
    return token, i, t, (i * C + t % C) * columns + t // C * channels, R * C * columns, (token < TOKENS) & (t < size)


@triton.jit
def attention_weights(
    rows, token, at, further, alive, query_bias, key_bias, channels,
    SCALE: tl.constexpr, P: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[P, P] softmax of the logits among the rows of each token, 0 between two tokens."""
    logits = tl.zeros([P, P], tl.float32)
    for begin in range(0, channels, BD):
        d = begin + tl.arange(0, BD)
        inside = alive[:, None] & (d < channels)[None, :]
        q, _ = activated(rows, at[:, None] + d[None, :], query_bias, inside)
        k, _ = activated(rows, (at + further)[:, None] + d[None, :], key_bias, inside)
        logits = tl.dot(q, tl.trans(k), logits, input_precision=PRECISION)
    logits = tl.where(token[:, None] == token[None, :], logits * SCALE, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@kernel
def attention_kernel(
    rows, parameters, y, size, channels,
    R: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y_t = p softmax(SCALE Q K^T) V + b; `parameters` are p (R), the biases of Q, K and V (3 R) and b."""
    token, i, t, at, further, alive = whose(size, channels, R, C, P, TOKENS)
    query_bias, key_bias = load(parameters + R + i, alive), load(parameters + 2 * R + i, alive)
    value_bias, out_bias = load(parameters + 3 * R + i, alive), tl.load(parameters + 4 * R).to(tl.float32)
    weights = attention_weights(
        rows, token, at, further, alive, query_bias, key_bias, channels, SCALE, P, BD, PRECISION
    )
    mixed = tl.sum(load(parameters + i, alive)[:, None] * weights, 0)
    out = tl.arange(0, 16)  # one row of a product for each token
    chosen = tl.where(token[None, :] == out[:, None], mixed[None, :], 0.0)
    t = tl.program_id(0).to(tl.int64) * TOKENS + out
    is_token = (out < TOKENS) & (t < size)
    for begin in range(0, channels, BD):
        d = begin + tl.arange(0, BD)
        is_channel = (d < channels)[None, :]
        v, _ = activated(rows, (at + 2 * further)[:, None] + d[None, :], value_bias, alive[:, None] & is_channel)
        total = tl.dot(chosen, v, input_precision=PRECISION) + out_bias
        tl.store(y + t[:, None] * channels + d[None, :], total, mask=is_token[:, None] & is_channel)


@kernel
def attention_gradient_kernel(
    rows, parameters, grad_y, drows, sums, size, channels,
    R: tl.constexpr, C: tl.constexpr, SCALE: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of `rows`, and each token's shares (5, R) of those of the parameters, that of b in all of a row."""
    token, i, t, at, further, alive = whose(size, channels, R, C, P, TOKENS)
    collapse = load(parameters + i, alive)
    query_bias, key_bias = load(parameters + R + i, alive), load(parameters + 2 * R + i, alive)
    value_bias = load(parameters + 3 * R + i, alive)
    weights = attention_weights(
        rows, token, at, further, alive, query_bias, key_bias, channels, SCALE, P, BD, PRECISION
    )
    mixed = tl.sum(collapse[:, None] * weights, 0)
    dmixed, of_query, of_key = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    of_value, of_out = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    for begin in range(0, channels, BD):
        d = begin + tl.arange(0, BD)
        inside = alive[:, None] & (d < channels)[None, :]
        g = load(grad_y + t[:, None] * channels + d[None, :], inside)
        place_of = (at + 2 * further)[:, None] + d[None, :]
        v, derivative = activated(rows, place_of, value_bias, inside)
        dmixed += tl.sum(g * v, 1)
        of_out += tl.sum(g, 1)
        g = mixed[:, None] * g * derivative
        of_value += tl.sum(g, 1)
        tl.store(drows + place_of, g, mask=inside)
    of_collapse = tl.sum(weights * dmixed[None, :], 1)
    dlogits = SCALE * weights * collapse[:, None] * (dmixed[None, :] - of_collapse[:, None])
    for begin in range(0, channels, BD):
        d = begin + tl.arange(0, BD)
        inside = alive[:, None] & (d < channels)[None, :]
        of_q, of_k = at[:, None] + d[None, :], (at + further)[:, None] + d[None, :]
        q, dq = activated(rows, of_q, query_bias, inside)
        k, dk = activated(rows, of_k, key_bias, inside)
        dq = tl.where(inside, dq * tl.dot(dlogits, k, input_precision=PRECISION), 0.0)
        dk = tl.where(inside, dk * tl.dot(tl.trans(dlogits), q, input_precision=PRECISION), 0.0)
        of_query += tl.sum(dq, 1)
        of_key += tl.sum(dk, 1)
        tl.store(drows + of_q, dq, mask=inside)
        tl.store(drows + of_k, dk, mask=inside)
    target = sums + t * (5 * R) + i
    tl.store(target, of_collapse, mask=alive)
    tl.store(target + R, of_query, mask=alive)
    tl.store(target + 2 * R, of_key, mask=alive)
    tl.store(target + 3 * R, of_value, mask=alive)
    tl.store(target + 4 * R, of_out, mask=alive)
