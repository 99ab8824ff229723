"""The ops of decoding: one token of each row equals the op for whole rows, in place, in every backend."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.local_attention import append_slot, drop_oldest, empty_state
from tests.host_syncs import as_on_an_accelerator
from tests.row_options import (
    causal_conv_of_token,
    local_attention,
    longhorn_scan_of_token,
    slots_token,
    systems_token,
    window_token,
)

NATIVE = pytest.param("native", marks=pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler"))
BACKENDS = ["reference", "torch", NATIVE]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check(got, want, dtype):
    for value, expected in zip(got, want):
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def dtypes(backend):
    return (torch.float32, torch.bfloat16) if backend == "native" else tuple(TOLERANCE)


WINDOWS = {
    "window": {"window": (5, 0)},
    "strict": {"window": (5, -1)},
    "far": {"window": (5, -2)},
    "chunk": {"window": (5, 0), "chunk_size": 4},
    "all": {"window": (None, 0)},
    "sink": {"window": (5, 0), "zero_kv_sink": True},
    "strict sink": {"window": (5, -1), "zero_kv_sink": True},
    "no key but its own": {"window": (0, 0)},
    "constant sink": {"window": (5, 0), "sink": 2},
    "constant sink of a strict window": {"window": (5, -1), "sink": 4},
    "scalar sink": {"window": (5, 0), "sink": 0},
    "scalar sink of a chunk": {"window": (5, 0), "chunk_size": 4, "sink": 0},
}


def window_options(name, dtype):
    """What `local_attention` is given; "sink" is how many heads' rows a sink's value has, which first tokens lack."""
    options = dict(WINDOWS[name])
    rows = options.pop("sink", None)
    if rows is None:
        return options
    logits = draw(2, 4, 30, seed=7, dtype=dtype).masked_fill(torch.arange(30) <= 5, -torch.inf)
    return options | {"sink_logits": logits, "sink_values": draw(rows, 5, seed=8, dtype=dtype) if rows else None}


@cache
def whole_rows(name, has_bias, dtype):
    """Thirty queries, keys and values of two rows, the bias, and the outputs of the attention of whole rows."""
    q, k, v = draw(2, 4, 30, 18, dtype=dtype), draw(2, 2, 30, 18, seed=1, dtype=dtype), draw(2, 2, 30, 5, seed=2)
    v = v.to(dtype)
    bias = draw(5, 4, seed=3, dtype=dtype).T if has_bias else None
    want, _ = local_attention(q, k, v, **window_options(name, dtype), bias=bias, backend="reference")
    return q, k, v, bias, want


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("static_address", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_step_of_the_window(backend, name, static_address, has_bias):
    """Thirty steps of rows that began at different times equal the attention of whole rows."""
    left, _ = WINDOWS[name]["window"]
    for dtype in dtypes(backend):
        options = window_options(name, dtype)
        logits = options.pop("sink_logits", None)
        q, k, v, bias, want = whole_rows(name, has_bias, dtype)
        state = empty_state(2, 2, 30 if left is None and static_address else left or 0, 18, value_dim=5, dtype=dtype)
        rows = []
        for t in range(30):
            step = (part[:, :, t] for part in (q, k, v))
            options |= {} if logits is None else {"sink_logits": logits[:, :, t]}
            y, state = window_token(*step, state, static_address=static_address, bias=bias, **options, backend=backend)
            rows.append(y)
        check((torch.stack(rows, 2),), (want,), dtype)
        held = left if left is not None else 30
        assert state.seen.tolist() == [30, 30] and state.keys.shape[2] == held
        assert torch.equal(state.keys, k[:, :, 30 - held :]) and torch.equal(state.values, v[:, :, 30 - held :])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_and_tokens_of_a_static_cache(backend):
    """A piece with padding, a token, a piece of two documents, and a token: keys of all tokens each in its slot."""
    q, k, v = draw(2, 4, 12, 6), draw(2, 2, 12, 6, seed=1), draw(2, 2, 12, 3, seed=2)
    pieces = [(slice(0, 5), {"lengths": torch.tensor([5, 3])}), (slice(5, 6), {}), (slice(6, 11), {"seq_idx": True})]
    states, outputs = {20: None, None: None}, {20: [], None: []}
    for piece, given in [*pieces, (slice(11, 12), {})]:
        documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
        given = {"seq_idx": documents} if "seq_idx" in given else given
        for room in states:
            rows = Rows.of(**given, return_final_state=True, capacity=room)
            rows = replace(rows, is_step=piece.stop - piece.start == 1)
            tokens = [x[:, :, piece] for x in (q, k, v)]
            y, states[room] = local_attention(
                *tokens, window=(None, 0), rows=rows, initial_state=states[room], backend=backend
            )
            outputs[room].append(y[:, :, :3])
    check(outputs[20], outputs[None], torch.float32)
    assert states[20].seen.tolist() == states[None].seen.tolist() == [4, 2]
    for row, count in enumerate((4, 2)):
        assert torch.equal(states[20].keys[row, :, :count], k[row, :, 12 - count :])
        assert torch.equal(states[None].keys[row, :, -count:], k[row, :, 12 - count :])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_began_at_different_times(backend):
    """A document that began later sees nothing of what is held from before it."""
    q, k, v = draw(2, 4, 3), draw(2, 4, 3, seed=1), draw(2, 4, 3, seed=2)
    keys, values = draw(2, 4, 6, 3, seed=3), draw(2, 4, 6, 3, seed=4)
    seen = torch.tensor([2, 40])
    y = slots_token(q, k, v, keys.clone(), values.clone(), seen, window=(5, 0), backend=backend)
    keys[0, :, :3], values[0, :, :3] = torch.nan, torch.nan
    got = slots_token(q, k, v, keys, values, seen, window=(5, 0), backend="reference")
    torch.testing.assert_close(y, got, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slots", [300, 1500])
@pytest.mark.parametrize("shared", [1, 2, 3, 4, 5, 9])
def test_more_slots_than_a_part_has(slots, shared):
    """A kernel may take parts of the slots apart: their sums are the sequential ones of float64, whatever the threads,
    with a row at its start and one whose document fills one part and a bit."""
    if missing_compiler() is not None:
        pytest.skip("no C compiler")
    heads = 2 * shared
    tables = {"bias": (heads, 40), "sink_logits": (3, heads), "sink_values": (2, 5), "head_scale": (heads,)}
    others = {"seen": torch.tensor([0, 130, slots]), "window": (slots - 1, 0), "layout": "by_rank"}
    shapes = {
        "q": (3, heads, 18),
        "k": (3, 2, 18),
        "v": (3, 2, 5),
        "keys": (3, 2, slots, 18),
        "values": (3, 2, slots, 5),
    }
    for dtype in dtypes("native"):
        drawn = {name: draw(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate((shapes | tables).items())}
        want = slots_token(**{name: x.double() for name, x in drawn.items()}, **others, backend="reference")
        threads = torch.get_num_threads()
        try:
            got = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                step = {name: x.clone() for name, x in drawn.items()}
                got.append(slots_token(**step, **others, backend="native"))
        finally:
            torch.set_num_threads(threads)
        check(got[:1], (want.to(dtype),), dtype)
        assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("right", [0, -1])
def test_step_of_blocks(backend, right):
    """Token i of a block sees its slots up to i (strictly before it), and the block's end leaves zeros."""
    for dtype in dtypes(backend):
        k, v, q = draw(2, 3, 14, 8, dtype=dtype), draw(2, 3, 14, 8, seed=1, dtype=dtype), draw(2, 3, 14, 8, seed=2)
        q = q.to(dtype)
        options = {"window": (4, right), "chunk_size": 5, "scale": 1.0}
        want, _ = local_attention(q, k, v, **options, backend="reference")
        held = [torch.zeros(2, 5, 3, 8, dtype=dtype).transpose(1, 2) for _ in "kv"]
        for t in range(14):
            token, seen = (part[:, :, t] for part in (q, k, v)), torch.full((2,), t)
            y = slots_token(*token, *held, seen, window=(None, right), layout="block", scale=1.0, backend=backend)
            check((y,), (want[:, :, t],), dtype)
            filled = (t + 1) % 5
            assert torch.equal(held[0][:, :, :filled], k[:, :, t + 1 - filled : t + 1])
            assert not held[0][:, :, filled:].any() and not held[1][:, :, filled:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalised_queries_and_keys(backend):
    q, k, v = draw(2, 4, 8), draw(2, 2, 8, seed=1), draw(2, 2, 8, seed=2)
    keys, values, scale = draw(2, 2, 5, 8, seed=3), draw(2, 2, 5, 8, seed=4), draw(4, seed=5)
    bias, seen = draw(4, 6, seed=6), torch.tensor([9, 2])

    def normalised(x):
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    factor = scale.abs().unsqueeze(1)
    rows = [part.unsqueeze(2).repeat(1, 1, 7, 1) * torch.arange(1.0, 8.0).view(7, 1) for part in (q, k, v)]
    by_hand = (normalised(rows[0]) * factor.unsqueeze(1), normalised(rows[1]), rows[2])
    given = {"window": (4, 0), "scale": 1.0, "backend": backend, "return_final_state": True}
    want, end = local_attention(*by_hand, bias=bias * factor, **given)
    got, state = local_attention(*rows, bias=bias, head_scale=scale, **given)
    check((got, state.keys), (want, end.keys), torch.float32)
    options = {"window": (4, 0), "scale": 1.0, "backend": "reference"}
    want = slots_token(
        normalised(q) * factor, normalised(k), v, keys.clone(), values.clone(), seen, bias=bias * factor, **options
    )
    options |= {"head_scale": scale, "backend": backend}
    y = slots_token(q, k, v, keys, values, seen, bias=bias, **options)
    check((y, keys[:, :, -1]), (want, normalised(k)), torch.float32)
    fixed = slots_token(q, None, None, keys, values, **options)
    options |= {"head_scale": None, "backend": "reference"}
    check((fixed,), (slots_token(normalised(q) * factor, None, None, keys, values, **options),), torch.float32)


@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 9])
def test_heads_that_share_keys(backend, heads):
    """However many share, and however many slots and entries there are: the C kernel takes them several at a time."""
    for slots, size, width in ((1, 5, 3), (3, 16, 33), (5, 64, 16), (16, 24, 70), (19, 64, 64), (37, 70, 130)):
        for dtype in dtypes(backend):
            q, k, v = draw(2, 2 * heads, size), draw(2, 2, size, seed=1), draw(2, 2, width, seed=2)
            bias, logits, column = draw(2 * heads, 6, seed=6), draw(2, 2 * heads, seed=7), draw(2, width, seed=8)
            token = [x.to(dtype) for x in (q, k, v)]
            held = [draw(2, 2, slots, size, seed=3, dtype=dtype), draw(2, 2, slots, width, seed=4, dtype=dtype)]
            options = {"window": (slots - 1, 0), "bias": bias, "sink_logits": logits, "sink_values": column}
            for seen in (torch.tensor([0, 99]), torch.tensor([slots // 2, slots])):
                found = [
                    (slots_token(*token, *mine, seen, **options, backend=name), *mine)
                    for name, mine in ((name, [part.clone() for part in held]) for name in (backend, "reference"))
                ]
                check(*found, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [2, 6])
def test_what_the_bias_hides_is_not_seen(backend, heads):
    """A head whose bias hides all keys gives 0, another one of its group what it sees; whatever the keys are."""
    q, keys, values = draw(1, heads, 8), draw(1, 2, 21, 8, seed=3), draw(1, 2, 21, 8, seed=4)
    k, v, seen = draw(1, 2, 8, seed=1), draw(1, 2, 8, seed=2), torch.tensor([99])
    hiding = torch.zeros(heads, 21)
    hiding[0] = -torch.inf
    y, want = (
        slots_token(q, k, v, keys.clone(), values.clone(), seen, window=(20, 0), bias=bias, backend=backend)
        for bias in (hiding, torch.zeros(heads, 21))
    )
    assert not y[:, 0].any()
    torch.testing.assert_close(y[:, 1:], want[:, 1:], rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [7, 700, 3000])
def test_a_mask_of_slots(backend, slots):
    """A row of all slots, one of the first ones, one with holes, and one that sees none: each equals the slots that it
    shows by themselves. What the C kernel is not shown at the ends is not read."""
    places = torch.arange(slots)
    mask = torch.stack([places >= 0, places < slots // 3, (places > slots // 5) & (places % 3 > 0), places < 0])
    for dtype in dtypes(backend):
        q, (keys, values) = draw(4, 6, 18, dtype=dtype), (draw(4, 2, slots, e, seed=e, dtype=dtype) for e in (18, 5))
        want = [
            slots_token(q[b : b + 1], None, None, keys[b : b + 1, :, row], values[b : b + 1, :, row], backend="torch")
            for b, row in enumerate(mask[:3])
        ]
        if backend == "native":
            for held in (keys, values):
                held[1, :, slots // 3 :], held[2, :, : slots // 5], held[3] = torch.nan, torch.nan, torch.nan
        got = slots_token(q, None, None, keys, values, mask=mask, backend=backend)
        check((got,), (torch.cat([*want, torch.zeros(1, 6, 5, dtype=dtype)]),), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_a_sink_is_one_more_column(backend, rows):
    """Of slots without an order, by hand; `head_scale` changes queries and keys, not the sink's logit."""
    q, keys, values = draw(2, 4, 8), draw(2, 2, 5, 8, seed=3), draw(2, 2, 5, 6, seed=4)
    logits, own, scale = draw(2, 4, seed=6), draw(rows, 6, seed=7) if rows else None, draw(4, seed=5)
    logits[0, 1] = -torch.inf
    y = slots_token(
        q, None, None, keys, values, sink_logits=logits, sink_values=own, head_scale=scale, scale=1.0, backend=backend
    )
    q, keys, values = q / q.norm(dim=-1, keepdim=True), keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
    products = (keys @ (q * scale.abs().unsqueeze(1)).unsqueeze(3)).squeeze(3)
    weights = torch.cat([products, logits.unsqueeze(2)], 2).softmax(2)
    column = torch.zeros(4, 6) if own is None else own.repeat_interleave(4 // rows, 0)
    want = (weights[..., :5].unsqueeze(2) @ values).squeeze(2) + weights[..., 5:] * column
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("right", [0, -1])
def test_a_sink_beside_a_block(backend, right):
    """The first token of a block, strictly before which there is nothing, sees the sink alone."""
    token, seen = (draw(2, 4, 8), draw(2, 2, 8, seed=1), draw(2, 2, 6, seed=2)), torch.tensor([5, 8])
    options = {"window": (None, right), "layout": "block", "sink_logits": draw(2, 4), "sink_values": draw(4, 6)}
    results = []
    for name in (backend, "reference"):
        held = draw(2, 2, 5, 8, seed=3), draw(2, 2, 5, 6, seed=4)
        results.append((slots_token(*token, *held, seen, **options, backend=name), *held))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    if right:
        torch.testing.assert_close(results[0][0][0], options["sink_values"], rtol=1e-6, atol=1e-6)


def test_a_window_moves_along_its_buffer():
    """No copy but where the buffer is used up, and what an older window holds stays as it is."""
    held, moved = torch.arange(12.0).view(1, 1, 6, 2), 0
    for token in range(40):
        wide = append_slot(held)
        moved += wide.untyped_storage().data_ptr() != held.untyped_storage().data_ptr()
        before = held.clone()
        wide[:, :, -1] = 100.0 + token
        assert torch.equal(held, before) and torch.equal(wide[:, :, :-1], before)
        held = drop_oldest(wide)
    assert moved == 3 and held[0, 0, :, 0].tolist() == [134.0, 135.0, 136.0, 137.0, 138.0, 139.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("states", [2, 16, 22])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_step_of_linear_systems(backend, states, is_complex, plain):
    """Against the matrix that it stands for."""
    for dtype in set(dtypes(backend)) - {torch.bfloat16}:
        shape = (2, 3, states)
        a, b, c, left, right = (draw(*shape, seed=seed, dtype=dtype) for seed in range(5))
        u, state, skip = draw(2, 3, dtype=dtype), draw(2, *shape, seed=6, dtype=dtype), draw(2, 3, seed=7, dtype=dtype)
        matrix = torch.diag_embed(a)
        if is_complex:
            real, imaginary = a.unflatten(-1, (-1, 2)).unbind(-1)
            matrix = torch.diag_embed(real.repeat_interleave(2, -1))
            for n in range(states // 2):
                matrix[..., 2 * n, 2 * n + 1], matrix[..., 2 * n + 1, 2 * n] = -imaginary[..., n], imaginary[..., n]
        options = {"is_complex": is_complex, "backend": backend}
        if not plain:
            matrix = matrix - left.unsqueeze(-1) * right.unsqueeze(-2)
            options |= {"low_rank": (left, right), "skip": skip, "silu": True}
        matrix = matrix + torch.eye(states, dtype=dtype)
        after = (matrix @ state.unsqueeze(-1)).squeeze(-1) + b * u[:, None, :, None]
        want = (c * after).sum(-1)
        want = want if plain else torch.nn.functional.silu(want + skip * u.unsqueeze(1))
        unread = state.clone()
        y = systems_token(u, state, a, b, output_rows=c, **options)
        check((y / 8, state / 8), (want / 8, after / 8), dtype)
        assert systems_token(u, unread, a, b, **options) is None
        check((unread / 8,), (after / 8,), dtype)


def test_steps_name_what_does_not_fit():
    with pytest.raises(ValueError, match=r"initial_state must have shape \(B, K - 1, D\) = \(1, 3, 4\)"):
        causal_conv_of_token(draw(1, 4), draw(1, 2, 4), draw(4, 4))
    with pytest.raises(ValueError, match="activation='relu'"):
        causal_conv_of_token(draw(1, 4), draw(1, 3, 4), draw(4, 4), activation="relu")
    with pytest.raises(ValueError, match=r"q must have shape \(B, L, N\) = \(1, 1, 2\)"):
        longhorn_scan_of_token(draw(1, 4), draw(1, 4), draw(1, 2), draw(1, 3), draw(1, 4, 3))
    with pytest.raises(ValueError, match=r"values must have shape"):
        slots_token(draw(1, 2, 4), None, None, draw(1, 2, 3, 4), draw(1, 1, 3, 4))
    with pytest.raises(ValueError, match="looks ahead"):
        slots_token(draw(1, 2, 4), None, None, draw(1, 2, 3, 4), draw(1, 2, 3, 4), window=(1, 1))
    with pytest.raises(ValueError, match=r"input_vector must have shape"):
        systems_token(draw(1, 4), draw(1, 1, 4, 2), draw(1, 4, 2), draw(1, 3, 2))
    with pytest.raises(TypeError, match="q must have dtype"):
        longhorn_scan_of_token(draw(1, 4), draw(1, 4), draw(1, 3), draw(1, 3).double(), draw(1, 4, 3))


# -- states in pages --------------------------------------------------------------------------------------------------


def paged(states: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Memory of five pages that lie apart, with these states (B, ...) in theirs and other numbers elsewhere."""
    size = states[0].numel()
    memory = draw(5, size + 3, seed=9, dtype=states.dtype)
    held = memory[:, 1 : size + 1].unflatten(1, states.shape[1:])
    held[pages] = states
    return held


def step_on_pages_of_scan(batch, dtype, backend, state, **given):
    x, z, logit = (draw(batch, 37, seed=seed, dtype=dtype) for seed in range(3))
    k, q = draw(batch, 5, seed=3, dtype=dtype), draw(batch, 5, seed=4, dtype=dtype)
    return longhorn_scan_of_token(x, logit, k, q, state, z=z, D=draw(37, seed=5), **given, backend=backend)


def step_on_pages_of_convolution(batch, dtype, backend, state, **given):
    x, weight = draw(batch, 37, dtype=dtype), draw(37, 4, seed=1, dtype=dtype)
    return causal_conv_of_token(x, state, weight, activation="silu", **given, backend=backend)


def step_on_pages_of_heads(batch, dtype, backend, state, **given):
    x, z, logit = (draw(batch, 12, seed=seed, dtype=dtype) for seed in range(3))
    k, q = draw(batch, 3, 5, seed=3, dtype=dtype), draw(batch, 3, 5, seed=4, dtype=dtype)
    return longhorn_scan_of_token(x, logit, k, q, state, z=z, D=draw(12, seed=5), **given, backend=backend)


PAGED = {
    "heads": (step_on_pages_of_heads, (12, 5)),
    "scan": (step_on_pages_of_scan, (37, 5)),
    "convolution": (step_on_pages_of_convolution, (3, 37)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_on_pages(backend, name, dtype):
    """The bits of a step on rows; no number of another page changes, nor any between the pages."""
    step, shape = PAGED[name]
    pages = torch.tensor([3, 0, 4])
    rows = draw(3, *shape, seed=6, dtype=dtype)
    held = paged(rows, pages)
    others = held._base.clone()
    want = step(3, dtype, backend, rows)
    got = step(3, dtype, backend, held, pages=pages)
    assert torch.equal(got, want) and torch.equal(held[pages], rows)
    changed = paged(held[pages].clone(), pages)._base
    assert torch.equal(held._base, changed) and not torch.equal(others, changed)


@pytest.mark.parametrize("name", PAGED)
def test_pages_that_are_none(name):
    """Refused before anything is written; by C too, where the values are not looked at before."""
    step, shape = PAGED[name]
    held = paged(draw(2, *shape), torch.tensor([0, 1]))
    before = held._base.clone()
    for pages in ([0, 5], [-1, 2], [3, 3]):
        with pytest.raises(ValueError, match=r"pages must be different ones of 0\.\.4, got \["):
            step(2, torch.float32, None, held, pages=torch.tensor(pages))
    with pytest.raises(ValueError, match=r"pages must have shape \(B\) = \(2\)"):
        step(2, torch.float32, None, held, pages=torch.tensor([1]))
    with pytest.raises(TypeError, match="pages must be int64"):
        step(2, torch.float32, None, held, pages=torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="its pages must be contiguous"):
        step(2, torch.float32, None, draw(5, *shape[::-1]).mT, pages=torch.tensor([1, 2]))
    if missing_compiler() is None:
        # those of heads are gathered by torch
        refused = (IndexError, "out of range") if name == "heads" else (ValueError, "pages must lie within the memory")
        with as_on_an_accelerator(), pytest.raises(refused[0], match=refused[1]):
            step(2, torch.float32, "native", held, pages=torch.tensor([0, 5]))
    assert torch.equal(held._base, before)
