"""Local attention: every path equals a dense masked softmax in float64, in forward and gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.local_attention import AttentionState, empty_state
from tests.row_options import local_attention
from tests.tiny_models import compiles

HEADS, SIZE = 2, 3
needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")
NATIVE = pytest.param("native", torch.float32, marks=needs_compiler)


def random_inputs(batch, length, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, HEADS, length, SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    )


def dense(
    q,
    k,
    v,
    *,
    window,
    chunk_size=None,
    bias=None,
    softcap=None,
    zero_keys=False,
    sink_logits=None,
    sink_values=None,
    documents=None,
    lengths=None,
):
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
    logits = q @ k.transpose(2, 3) * SIZE**-0.5
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits + table[:, (distance + offset).clamp(0, table.shape[1] - 1)]
    weights = torch.where(allowed[:, None], logits, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if zero_keys:
        missing = torch.arange(-right, left + 1)
        extra = table[:, missing.clamp(max=table.shape[1] - 1)].exp()[None, :, None]
        total = total + (extra * (missing > rank[:, None, :, None])).sum(-1, keepdim=True)
    if sink_logits is not None:
        of_sink = sink_logits.exp().unsqueeze(-1)
        total = total + of_sink
    y = torch.where(total > 0, weights / total.clamp(min=1e-300), 0) @ v
    if sink_values is None:
        return y
    return y + torch.where(total > 0, of_sink / total.clamp(min=1e-300), 0) * sink_values.unsqueeze(1)


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
    sink = draw(st.sampled_from([{}, {}, {"scalar": True}, {"constant": True}])) if not zero_keys else {}
    if sink:
        logits = torch.randn(batch, HEADS, length, generator=generator, dtype=torch.float64)
        absent = torch.rand(batch, HEADS, length, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        values = torch.randn(HEADS, SIZE, generator=generator, dtype=torch.float64) if "constant" in sink else None
        sink = {"sink_logits": logits.masked_fill(absent, -torch.inf), "sink_values": values}
    softcap = draw(st.sampled_from([None, None, 0.7]))
    return {
        "inputs": random_inputs(batch, length, seed),
        "options": {"window": (left, right), "chunk_size": chunk_size, "bias": bias, **sink, "softcap": softcap},
        "documents": documents,
        "lengths": lengths,
        "zero_keys": zero_keys,
    }


def real_tokens(x, lengths):
    if lengths is None:
        return x
    return torch.where((torch.arange(x.shape[2]) < lengths[:, None])[:, None, :, None], x, 0)


@settings(max_examples=25, deadline=None)
@given(problems())
def test_reference_equals_dense(problem):
    rows = {"lengths": problem["lengths"]}
    inputs, options = [x[:, :, :30] for x in problem["inputs"]], dict(problem["options"])
    if "sink_logits" in options:
        options["sink_logits"] = options["sink_logits"][:, :, :30]
    documents = None if problem["documents"] is None else problem["documents"][:, :30]
    if rows["lengths"] is not None:
        rows["lengths"] = rows["lengths"].clamp(max=inputs[0].shape[2])
    expected = dense(*inputs, **options, zero_keys=problem["zero_keys"], documents=documents, **rows)
    y, _ = local_attention(
        *inputs,
        **options,
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
    logits = options.pop("sink_logits", None)
    whole, end = local_attention(q, k, v, **options, sink_logits=logits, seq_idx=documents, return_final_state=True)
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
        if logits is not None:
            options["sink_logits"] = torch.cat([logits[:, :, piece], padding[..., 0]], 2)
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
        ({"window": (4, 0), "softcap": 0.0}, "softcap=0.0 must be positive"),
        ({"window": (4, 1), "zero_kv_sink": True}, "causal window"),
        ({"window": (4, 1), "return_final_state": True}, "looks ahead"),
        ({"window": (1, 1), "bias": torch.zeros(HEADS, 4)}, "odd"),
        ({"window": (1, 0), "bias": torch.zeros(HEADS + 1, 4)}, "bias"),
        ({"window": (4, 0), "initial_state": empty_state(2, HEADS, 3, SIZE)}, "holds 3 keys"),
        ({"window": (4, 0), "lengths": torch.tensor([1, 9])}, "lengths"),
        ({"window": (4, 0), "dropout": 1.5}, r"dropout=1.5 must lie in \[0, 1\)"),
        ({"window": (4, 0), "sink_values": torch.zeros(HEADS, SIZE)}, "sink_values without sink_logits"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        local_attention(*random_inputs(2, 8, 0), **options)


def test_heads_share_keys_evenly():
    q, k, v = random_inputs(2, 8, 0)
    with pytest.raises(ValueError, match="multiple of k's 2 heads, got 3"):
        local_attention(torch.cat([q, q[:, :1]], 1), k, v, window=(3, 0))


def test_a_window_is_a_pair():
    with pytest.raises(TypeError, match=r"window must be a pair \(left, right\), got 5"):
        local_attention(*random_inputs(2, 8, 0), window=5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 37])
def test_causal_chunks_are_a_batch_of_them(length, groups):
    """Ragged, shorter than a chunk, and with NaN in padding: outputs and gradients are the equation's."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, length, 4), (2, groups, length, 4), (2, groups, length, 6)]
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    lengths = torch.tensor([length, length // 2])
    for x in leaves[1:]:
        x[1, :, length // 2 :] = torch.nan
    results = []
    for backend in ("torch", "reference"):
        inputs = [x.clone().requires_grad_() for x in leaves]
        y, _ = local_attention(*inputs, window=(9, 0), chunk_size=10, lengths=lengths, backend=backend)
        assert y.isfinite().all()
        y = real_tokens(y, lengths)
        results.append([y, *(torch.autograd.grad(y.square().sum(), inputs) if length else ())])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


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


# rows longer than a segment of 256 queries, windows of several tiles of 64 keys, all sizes of heads
LONG = {
    "window": {"window": (300, 0), "columns": 129},
    "zeros before the row": {"window": (300, -1), "columns": 301, "zero_kv_sink": True},
    "zeros before documents": {"window": (90, -1), "columns": 40, "zero_kv_sink": True, "documents": True},
    "sink": {"window": (300, 0), "sink": (2, True)},
    "sink beside a bias": {"window": (90, -1), "columns": 40, "documents": True, "sink": (4, True)},
    "sink without a value": {"window": (130, 0), "seen": [130, 7], "lengths": [600, 333], "sink": (4, False)},
    "zeros without a bias": {"window": (90, 0), "zero_kv_sink": True, "seen": [40, 500]},
    "two-sided": {"window": (70, 100), "columns": 61, "lengths": [600, 333]},
    "chunks": {"window": (255, 0), "chunk_size": 256, "seen": [100, 700]},
    "all": {"window": (None, 0), "columns": 9, "seen": [70, 20], "held": 70},
    "all of documents": {"window": (None, None), "columns": 9, "documents": True, "lengths": [0, 590]},
    "pieces": {"window": (130, 0), "columns": 200, "seen": [130, 7], "documents": True},
}
SIZES = [(16, 16), (64, 64), (24, 40), (8, 8), (96, 16), (3, 5), (32, 32)]


def long_problem(case, sizes, heads=(4, 2), dtype=torch.float64):
    """Leaves of a call of `local_attention` and the call."""
    options = dict(LONG[case])
    columns, held, seen = (
        options.pop("columns", 0),
        options.pop("held", options["window"][0]),
        options.pop("seen", None),
    )
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 600, heads[0], sizes[0]), *((2, 600, heads[1], size) for size in sizes)]
    leaves = [torch.randn(shape, generator=generator) for shape in shapes]
    leaves += [torch.randn(heads[0], columns, generator=generator)] if columns else []
    leaves += [torch.randn(2, heads[1], held, size, generator=generator) for size in sizes] if seen else []
    rows, has_value = options.pop("sink", (0, False))
    sink = [2 * torch.randn(2, 600, heads[0], generator=generator)] if rows else []  # rows that lie apart
    if rows:
        sink[0][:, : options["window"][0]] = -torch.inf
    sink += [torch.randn(rows, sizes[1], generator=generator)] if has_value else []
    leaves = [*sink, *leaves]
    if options.pop("documents", False):
        options["seq_idx"] = (torch.rand(2, 600, generator=generator) < 0.01).cumsum(1)
    if "lengths" in options:
        options["lengths"] = torch.tensor(options["lengths"])
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]

    def run(**more):
        *_, old_keys, old_values = leaves
        if sink:
            more["sink_logits"], more["sink_values"] = leaves[0].mT, leaves[1] if has_value else None
        state = AttentionState(old_keys, old_values, torch.tensor(seen)) if seen else None
        q, k, v, *others = leaves[len(sink) :]
        rows = (x.transpose(1, 2) for x in (q, k, v))
        bias = others[0] if columns else None
        return local_attention(*rows, bias=bias, initial_state=state, **options, **more)[0]

    return leaves, run, options.get("lengths")


def results_of(case, sizes, backend, dtype=torch.float64):
    leaves, run, lengths = long_problem(case, sizes, dtype=dtype)
    y = real_tokens(run(backend=backend), lengths)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return [y, *torch.autograd.grad((y * weights).sum(), leaves)]


@needs_compiler
@pytest.mark.parametrize("case, sizes", list(zip(LONG, SIZES * 2)))
def test_native_on_long_rows(case, sizes):
    for got, want in zip(results_of(case, sizes, "native", torch.float32), results_of(case, sizes, "torch")):
        assert (got - want).abs().max() <= 5e-6 * want.abs().max(), case


@needs_compiler
def test_native_gives_the_same_bits_with_any_number_of_threads():
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            cases = ("zeros before the row", "sink beside a bias")
            found.append([x for case in cases for x in results_of(case, (16, 16), "native", torch.float32)])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@needs_compiler
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_native_keeps_padding_out_of_gradients(bad):
    """Whatever stands in queries, keys or values after a row's length, or in the empty slots of a state."""
    inputs, state = random_inputs(2, 50, 9, torch.float32), empty_state(2, HEADS, 5, SIZE)
    lengths = torch.tensor([50, 30])
    inputs[bad][1, :, 30:] = torch.nan
    if bad:
        state[bad - 1][:] = torch.nan
    leaves = [x.requires_grad_() for x in inputs]
    y, _ = local_attention(*leaves, window=(5, 0), lengths=lengths, initial_state=state, backend="native")
    assert y.isfinite().all()
    for gradient in torch.autograd.grad(y[1, :, :30].sum() + y[0].sum(), leaves):
        assert gradient.isfinite().all() and not gradient[1, :, 30:].any()


@needs_compiler
def test_native_passes_a_nan_on():
    q, k, v = random_inputs(1, 80, 9, torch.float32)
    q[0, 0, 40] = torch.nan
    y, _ = local_attention(q, k, v, window=(20, 0), backend="native")
    assert y[0, 0, 40].isnan().all() and not y.isnan().sum() > SIZE


@pytest.mark.parametrize("backend", ["torch", "reference", pytest.param("native", marks=needs_compiler)])
def test_a_nan_of_a_sink_is_passed_on(backend):
    q, k, v = random_inputs(1, 80, 9, torch.float32)
    logits = torch.zeros(1, HEADS, 80)
    logits[0, 0, 40] = torch.nan
    y, _ = local_attention(q, k, v, window=(20, 0), sink_logits=logits, backend=backend)
    assert y[0, 0, 40].isnan().all() and not y.isnan().sum() > SIZE


@needs_compiler
@pytest.mark.parametrize("shape", [(0, HEADS, 5, SIZE), (2, HEADS, 0, SIZE)])
def test_native_of_nothing(shape):
    leaves = [torch.zeros(shape, requires_grad=True) for _ in range(3)] + [torch.zeros(HEADS, 3, requires_grad=True)]
    y, _ = local_attention(*leaves[:3], window=(2, -1), bias=leaves[3], zero_kv_sink=True, backend="native")
    assert y.shape == shape
    assert not torch.autograd.grad(y.sum(), leaves)[3].any()
    with pytest.raises(ValueError, match=r"bias .* at least one distance, got R = 0"):
        local_attention(*leaves[:3], window=(2, 0), bias=torch.zeros(HEADS, 0), backend="native")


@needs_compiler
def test_native_op_is_well_registered():
    """Schema, fake implementation and autograd registration; its gradient has none of its own, and says so."""
    from hf_hybrid_ssm.ops.local_attention.native import _attention

    q, k, v = (x.transpose(1, 2).requires_grad_() for x in torch.randn(3, 2, 9, HEADS, SIZE))
    bias, seen = torch.randn(HEADS, 4, requires_grad=True), torch.tensor([2, 3])
    rows = (seen, torch.zeros(2, 9).long(), torch.tensor([9, 4]), 0.5)
    arguments = (q, k, v, bias, None, None, *rows, [3, 0, 0, 1])
    sink = (torch.randn(2, HEADS, 9, requires_grad=True), torch.randn(HEADS, SIZE, requires_grad=True))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_attention, arguments, test_utils=checks)
    torch.library.opcheck(_attention, (q, k, v, None, *sink, *rows, [3, 0, 0, 0]), test_utils=checks)
    (gradient,) = torch.autograd.grad(_attention(*arguments)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_chunks_of_one_token_keep_the_middle_of_a_two_sided_bias(backend):
    """Such a window looks ahead no more, and its table is still one of both sides."""
    q, k, v = torch.randn(3, 1, HEADS, 5, SIZE, dtype=torch.float64)
    bias, sink = torch.randn(HEADS, 3, dtype=torch.float64), torch.randn(1, HEADS, 5, dtype=torch.float64)
    options = {"window": (1, 1), "chunk_size": 1, "bias": bias, "sink_logits": sink}
    y, _ = local_attention(q, k, v, **options, backend=backend)
    torch.testing.assert_close(y, dense(q, k, v, **options))


@pytest.mark.parametrize("backend", ["torch", "reference", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("length", [5, 40])
@pytest.mark.parametrize(
    "options",
    [{"window": (3, 0)}, {"window": (None, 0)}, {"window": (2, 2)}, {"window": (6, 0), "chunk_size": 4}],
    ids=["window", "all", "both sides", "chunks"],
)
def test_inputs_of_any_strides(options, length, backend):
    """Torch's kernels read rows of a head from one address on, and look at no stride within them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, HEADS, length, 16)
    bias = torch.randn(HEADS, 5, requires_grad=True)
    expected = None
    for spread in (lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x.repeat_interleave(2, -1)[..., ::2]):
        leaves = [spread(x).detach().requires_grad_() for x in (q, k, v)]
        assert leaves[0].shape == q.shape
        y, _ = local_attention(*leaves, bias=bias, backend=backend, **options)
        found = [y, *torch.autograd.grad(y.cos().sum(), [*leaves, bias])]
        expected = expected or found
        for got, wanted in zip(found, expected):
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
