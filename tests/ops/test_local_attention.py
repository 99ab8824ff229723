"""Local attention: every path equals a dense masked softmax in float64, in forward and gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid_ssm.ops.local_attention import empty_state, local_attention
from tests.tiny_models import compiles

HEADS, SIZE = 2, 3


def random_inputs(batch, length, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, HEADS, length, SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    )


def dense(q, k, v, *, window, chunk_size=None, bias=None, zero_keys=False, documents=None, lengths=None):
    """The definition with an L x L matrix, for rows without a cache."""
    batch, _, length, _ = q.shape
    left, right = window
    i = torch.arange(length)
    distance = i[:, None] - i
    documents = torch.zeros(batch, length, dtype=torch.int64) if documents is None else documents
    lengths = torch.full((batch,), length) if lengths is None else lengths
    rank = torch.stack([torch.stack([(row[:t] == row[t]).sum() for t in range(length)]) for row in documents])
    allowed = (documents[:, :, None] == documents[:, None]) & (i < lengths[:, None])[:, None]
    if right is not None:
        allowed = allowed & (distance >= -right)
    if left is not None:
        allowed = allowed & (distance <= left)
    if chunk_size is not None:
        chunk = rank // chunk_size
        allowed = allowed & (chunk[:, :, None] == chunk[:, None])
    table = q.new_zeros(HEADS, 1) if bias is None else bias
    offset = 0 if right is not None and right <= 0 else table.shape[1] // 2
    logits = q @ k.transpose(2, 3) * SIZE**-0.5 + table[:, (distance + offset).clamp(0, table.shape[1] - 1)]
    weights = torch.where(allowed[:, None], logits, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if zero_keys:
        missing = torch.arange(-right, left + 1)
        extra = table[:, missing.clamp(max=table.shape[1] - 1)].exp()[None, :, None]
        total = total + (extra * (missing > rank[:, None, :, None])).sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-300), 0) @ v


@st.composite
def problems(draw, causal=None):
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 80))
    causal = draw(st.booleans()) if causal is None else causal
    right = draw(st.sampled_from([0, -1])) if causal else draw(st.sampled_from([1, 4, 20, None]))
    left = draw(st.sampled_from([1, 2, 7, 20, 33, None]))
    chunk_size = draw(st.sampled_from([None, None, 1, 5, 18]))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    bias = None
    if draw(st.booleans()):
        size = draw(st.integers(1, 40))
        bias = torch.randn(HEADS, size if causal else 2 * size + 1, generator=generator, dtype=torch.float64)
    documents, lengths = None, None
    if draw(st.booleans()):
        starts = torch.rand(batch, length, generator=generator) < 0.1
        documents = starts.cumsum(1)
    if draw(st.booleans()):
        lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    zero_keys = causal and left is not None and chunk_size is None and draw(st.booleans())
    return {
        "inputs": random_inputs(batch, length, seed),
        "options": {"window": (left, right), "chunk_size": chunk_size, "bias": bias},
        "documents": documents,
        "lengths": lengths,
        "zero_keys": zero_keys,
    }


def real_tokens(x, lengths):
    if lengths is None:
        return x
    return torch.where((torch.arange(x.shape[2]) < lengths[:, None])[:, None, :, None], x, 0)


@settings(max_examples=120, deadline=None)
@given(problems())
def test_equals_dense_forward_and_gradient(problem):
    options, rows = problem["options"], {"lengths": problem["lengths"]}
    leaves = [x.clone().requires_grad_() for x in problem["inputs"]]
    if options["bias"] is not None:
        leaves.append(options["bias"].clone().requires_grad_())
        options = {**options, "bias": leaves[3]}
    expected = dense(*leaves[:3], **options, zero_keys=problem["zero_keys"], documents=problem["documents"], **rows)
    y, _ = local_attention(
        *leaves[:3], **options, zero_kv_sink=problem["zero_keys"], seq_idx=problem["documents"], **rows
    )
    assert torch.isfinite(y).all()
    expected, y = real_tokens(expected, problem["lengths"]), real_tokens(y, problem["lengths"])
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    gradients = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    for gradient, want in zip(gradients, wanted):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if gradient is None else gradient + zero, zero if want is None else want + zero, rtol=1e-9, atol=1e-11
        )


@settings(max_examples=25, deadline=None)
@given(problems())
def test_reference_equals_dense(problem):
    rows = {"lengths": problem["lengths"]}
    inputs = [x[:, :, :30] for x in problem["inputs"]]
    documents = None if problem["documents"] is None else problem["documents"][:, :30]
    if rows["lengths"] is not None:
        rows["lengths"] = rows["lengths"].clamp(max=inputs[0].shape[2])
    expected = dense(*inputs, **problem["options"], zero_keys=problem["zero_keys"], documents=documents, **rows)
    y, _ = local_attention(
        *inputs,
        **problem["options"],
        zero_kv_sink=problem["zero_keys"],
        seq_idx=documents,
        **rows,
        backend="reference",
    )
    torch.testing.assert_close(y, real_tokens(expected, rows["lengths"]), rtol=1e-11, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(problems(causal=True), st.data())
def test_pieces_equal_one_forward(problem, data):
    """Any split, down to single tokens, each row with its own number of real tokens in every piece."""
    q, k, v = problem["inputs"]
    batch, _, length, _ = q.shape
    options = {**problem["options"], "zero_kv_sink": problem["zero_keys"]}
    documents = problem["documents"]
    whole, end = local_attention(q, k, v, **options, seq_idx=documents, return_final_state=True)
    state, done = None, 0
    while done < length:
        size = data.draw(st.integers(1, 30))
        piece = slice(done, done + size)
        padding = torch.randn(batch, HEADS, data.draw(st.integers(0, 2)), SIZE, dtype=q.dtype)
        inputs = [torch.cat([x[:, :, piece], padding], 2) for x in (q, k, v)]
        real = q[:, :, piece].shape[2]
        lengths = torch.full((batch,), real) if padding.shape[2] else None
        rows = None
        if documents is not None:
            rows = documents[:, piece]
            rows = torch.cat([rows, rows[:, -1:].expand(-1, padding.shape[2])], 1)
            if done and (documents[:, done] != documents[:, done - 1]).any():
                return  # the state belongs to the first document of the piece: a caller starts such rows afresh
        y, state = local_attention(
            *inputs, **options, initial_state=state, seq_idx=rows, lengths=lengths, return_final_state=True
        )
        torch.testing.assert_close(y[:, :, :real], whole[:, :, piece], rtol=1e-11, atol=1e-12)
        done += real
    torch.testing.assert_close(state.seen, end.seen)
    held = int(min(state.seen.min(), state.keys.shape[2]))
    if held:
        torch.testing.assert_close(state.keys[:, :, -held:], end.keys[:, :, -held:])
        torch.testing.assert_close(state.values[:, :, -held:], end.values[:, :, -held:])


@pytest.mark.parametrize("zero_keys", [False, True])
def test_steps_from_an_empty_state_and_rows_that_stop(zero_keys):
    q, k, v = random_inputs(2, 30, 3)
    options = {"window": (6, -1), "zero_kv_sink": zero_keys}
    options["bias"] = torch.randn(HEADS, 8, dtype=torch.float64)
    whole, _ = local_attention(q, k, v, **options)
    state = empty_state(2, HEADS, 6, SIZE, dtype=torch.float64)
    for t in range(30):
        # the second row pauses at every third call: a padded column leaves its state alone
        lengths = torch.tensor([1, 0 if t % 3 == 2 else 1])
        done = torch.tensor([t, t - t // 3 - (t % 3 == 2) + (t % 3 == 2)])
        token = [torch.stack([x[0, :, t], x[1, :, done[1] % 30]]).unsqueeze(2) for x in (q, k, v)]
        y, state = local_attention(*token, **options, initial_state=state, lengths=lengths, return_final_state=True)
        torch.testing.assert_close(y[0, :, 0], whole[0, :, t], rtol=1e-11, atol=1e-12)
        if lengths[1]:
            torch.testing.assert_close(y[1, :, 0], whole[1, :, done[1]], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (4, 0)},
        {"window": (5, -1), "zero_kv_sink": True},
        {"window": (3, 3)},
    ],
    ids=["causal", "strict", "two-sided"],
)
def test_gradcheck(options, length):
    inputs = [x.requires_grad_() for x in random_inputs(1, length, 5)]
    bias = torch.randn(HEADS, 7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda q, k, v, bias: local_attention(q, k, v, bias=bias, **options)[0], (*inputs, bias))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("length", [5, 40])
def test_heads_that_share_keys(length, backend):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 6, length, SIZE, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, length, SIZE, generator=generator, dtype=torch.float64).unbind()
    options = {"window": (3, 0), "bias": torch.randn(6, 4, generator=generator, dtype=torch.float64)}
    expected, _ = local_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), **options)
    y, state = local_attention(q, k, v, **options, return_final_state=True, backend=backend)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    again, _ = local_attention(q, k, v, **options, initial_state=state, backend=backend)
    every = [torch.cat([x, x], 2) for x in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))]
    torch.testing.assert_close(again, local_attention(*every, **options)[0][:, :, length:], rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="multiple of k's 2 heads"):
        local_attention(q[:, :5], k, v, window=(3, 0))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_lower_precision(dtype, tolerance):
    inputs = random_inputs(2, 100, 8, dtype)
    bias = torch.randn(HEADS, 30, dtype=torch.float64)
    options = {"window": (24, 0)}
    y, state = local_attention(*inputs, **options, bias=bias.to(dtype), return_final_state=True)
    assert y.dtype == dtype == state.keys.dtype
    wide = [x.double() for x in inputs]
    expected, _ = local_attention(*wide, **options, bias=bias.to(dtype).double(), backend="reference")
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


def test_nan_in_padding_stays_there():
    q, k, v = random_inputs(2, 50, 9)
    lengths = torch.tensor([50, 30])
    expected, _ = local_attention(q, k, v, window=(5, 5), lengths=lengths)
    for x in (q, k, v):
        x[1, :, 30:] = torch.nan
    y, _ = local_attention(q, k, v, window=(5, 5), lengths=lengths)
    torch.testing.assert_close(y[1, :, :30], expected[1, :, :30])


def test_no_square_matrix():
    """At L = 1,048,576 a square of bytes would be a terabyte; the meta device counts without computing."""
    q = torch.empty(1, 1, 2**20, 2, device="meta")
    y, _ = local_attention(q, q, q, window=(31, 0))
    assert y.shape == q.shape


@compiles
def test_compiles_into_one_graph():
    q, k, v = random_inputs(2, 48, 4, torch.float32)
    bias = torch.randn(HEADS, 9)

    def attend(q, k, v, bias):
        return local_attention(q, k, v, window=(8, 0), bias=bias)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, bias), attend(q, k, v, bias), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": (-1, 0)}, "left must be at least 0"),
        ({"window": (2, -3)}, r"window=\(2, -3\): left must be at least 0, and at least -right"),
        ({"window": (4, 0), "chunk_size": 0}, "chunk_size"),
        ({"window": (4, 1), "zero_kv_sink": True}, "causal window"),
        ({"window": (4, 1), "return_final_state": True}, "looks ahead"),
        ({"window": (1, 1), "bias": torch.zeros(HEADS, 4)}, "odd"),
        ({"window": (1, 0), "bias": torch.zeros(HEADS + 1, 4)}, "bias"),
        ({"window": (4, 0), "capacity": 3}, "capacity=3"),
        ({"window": (4, 0), "initial_state": empty_state(2, HEADS, 3, SIZE)}, "holds 3 keys"),
        ({"window": (4, 0), "lengths": torch.tensor([1, 9])}, "lengths"),
        ({"window": (4, 0), "dropout": 1.5}, r"dropout=1.5 must lie in \[0, 1\)"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        local_attention(*random_inputs(2, 8, 0), **options)


def test_a_window_is_a_pair():
    with pytest.raises(TypeError, match=r"window must be a pair \(left, right\), got 5"):
        local_attention(*random_inputs(2, 8, 0), window=5)


@pytest.mark.parametrize("length", [1, 15, 64, 100])
@pytest.mark.parametrize("window", [(20, 0), (32, 0), (31, 0), (20, -1), (3, 0)])
@pytest.mark.parametrize("options", [{}, {"zero_kv_sink": True}, {"chunk_size": 8}, {"lengths": torch.tensor([9, 0])}])
def test_dropout_of_nothing_changes_nothing(options, window, length):
    """With dropout there is no fused kernel on a CPU, and attention runs by its equation."""
    options = {**options, "window": window, "bias": torch.randn(HEADS, 7, dtype=torch.float64, requires_grad=True)}
    if "lengths" in options:
        options["lengths"] = options["lengths"].clamp(max=length)
    leaves = [x.requires_grad_() for x in random_inputs(2, length, 0)]
    results = []
    for dropout in (0.0, 1e-15):
        y, _ = local_attention(*leaves, **options, dropout=dropout)
        y = real_tokens(y, options.get("lengths"))
        results.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), [*leaves, options["bias"]])])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
