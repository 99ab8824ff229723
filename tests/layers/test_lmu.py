"""The Legendre memory and implicit attention: golden numbers of 400-bit arithmetic, all forms alike, decoding."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hybrid_ssm.models.lmu_isa.modeling_lmu_isa import ImplicitAttention
from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.implicit_attention import native, torch_backend
from hf_hybrid_ssm.ops.implicit_attention.decoding import DeferredMemory, apply_deferred, defer_updates
from hf_hybrid_ssm.ops.legendre_memory import decode_memory, impulse_response, transition
from hf_hybrid_ssm.ops.legendre_memory.constants import finite_response
from tests.row_options import implicit_attention, legendre_memory

ENDS = Rows(return_final_state=True)
STEP = Rows(return_final_state=True, is_step=True)
PRESETS = [(50, 350.0), (65, 350.0), (90, 350.0), (110, 350.0), (150, 350.0), (220, 350.0)]
GOLDEN = {
    (6, 20.0): {
        (0, 0): 5.1736659814e-02, (1, 4): -2.2601594465e-02, (2, 5): 1.7218023324e-01, (5, 3): 1.9402465384e-01,
        (10, 2): -1.5274189238e-01, (19, 1): 6.5785446263e-02, (20, 4): 1.5463972052e-03, (25, 0): -1.6926191716e-03,
        (40, 5): 8.4880801681e-05, (63, 3): -5.7574167942e-07,
    },
    (50, 350.0): {
        (0, 0): 2.8509139502e-03, (1, 49): -5.8772403793e-02, (10, 25): 8.1977340056e-03, (100, 2): -2.7922302602e-03,
        (349, 1): 4.4456147322e-03, (400, 49): -5.8144104916e-06, (699, 25): -1.5905701931e-08,
    },
    (220, 350.0): {
        (0, 219): 1.2145192074e-02, (1, 110): 1.7278075929e-02, (10, 219): -5.3162326053e-02, (100, 0):
        2.8941203008e-03, (349, 219): -5.2225991663e-07, (400, 110): -3.7506341004e-05,
    },
}  # fmt: skip


@pytest.mark.parametrize(("order", "theta"), GOLDEN)
def test_impulse_response(order, theta):
    response = impulse_response(order, theta, 700)
    for (k, i), value in GOLDEN[order, theta].items():
        assert response[i, k].item() == pytest.approx(value, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize(("order", "theta"), [(6, 20.0), (50, 350.0), (220, 350.0), (250, 350.0)])
def test_unit_gain_and_contraction(order, theta):
    total = impulse_response(order, theta, int(4 * theta)).sum(1)
    unit = F.one_hot(torch.tensor(0), order).double()
    torch.testing.assert_close(total, unit, rtol=0, atol=1e-6 if order == 6 else 1e-10)
    scale = (2 * torch.arange(order, dtype=torch.float64) + 1).rsqrt()
    balanced = scale[:, None] * transition(order, theta) / scale
    assert torch.linalg.matrix_norm(balanced, 2) <= 1 + 1e-9


@pytest.mark.parametrize(("order", "theta"), [(6, 20.0), *PRESETS])
def test_delayed_signal_is_read_back(order, theta):
    length, frequency = int(3 * theta), 0.1 * order / (2 * theta)
    signal = torch.cos(2 * math.pi * frequency * torch.arange(length, dtype=torch.float64))
    memory, _ = legendre_memory(signal.view(1, -1, 1), order=order, theta=theta)
    delays = torch.arange(int(theta))
    error = (decode_memory(memory[0, -1], delays, theta=theta)[:, 0] - signal[length - 1 - delays]).abs()
    inner = (delays >= 0.1 * theta) & (delays <= 0.9 * theta)
    assert error[inner].max() < 4e-3 and error.max() < 2e-2


def test_float32_does_not_drift():
    x = torch.randn(1, 16384, 2, generator=torch.Generator().manual_seed(0))
    _, state = legendre_memory(x, order=50, theta=350.0, return_final_state=True)
    _, exact = legendre_memory(x.double(), order=50, theta=350.0, return_final_state=True)
    assert (state - exact).norm() / exact.norm() < 1e-5


def golden_layer(activation=F.gelu):
    t, c = torch.arange(40, dtype=torch.float64), torch.arange(3, dtype=torch.float64)
    x = torch.sin(0.7 * t[:, None] + 1.3 * c + 0.2)[None]
    a, row, i = (torch.arange(n, dtype=torch.float64) for n in (3, 2, 6))
    weight = torch.cos(0.5 * (a[:, None, None] + 1) + 1.1 * row[:, None] + 0.6 * i)
    collapse = torch.tensor([0.5, 0.75], dtype=torch.float64)
    return x, weight, collapse, {"theta": 20.0, "activation": activation}


@pytest.mark.parametrize("form", ["chunked", "fft", "recurrent", "reference"])
def test_golden_layer(form):
    x, weight, collapse, options = golden_layer()
    options |= {"backend": "reference"} if form == "reference" else {"form": form}
    y, _ = implicit_attention(x, weight, None, collapse, **options)
    expected = {
        0: [-8.4210302798e-03, -4.0390358327e-02, -1.4090757343e-02],
        5: [8.4537468449e-02, -9.7317224038e-02, -1.1416240014e-01],
        11: [4.3834240546e-01, 6.1123441671e-01, -4.9440411153e-02],
        39: [5.3335947242e-01, 4.6983452057e-01, -1.0692174095e-01],
    }
    for t, values in expected.items():
        torch.testing.assert_close(y[0, t], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-11)
    x, weight, collapse, options = golden_layer(lambda z: F.gelu(z, approximate="tanh"))
    y, _ = implicit_attention(x, weight, None, collapse, **options)
    values = [4.3830548547e-01, 6.1117686397e-01, -4.9442522421e-02]
    torch.testing.assert_close(y[0, 11], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-11)


@st.composite
def problems(draw):
    batch, length, channels = draw(st.integers(1, 3)), draw(st.integers(1, 100)), draw(st.integers(1, 4))
    order, rows, seed = draw(st.integers(2, 9)), draw(st.integers(1, 3)), draw(st.integers(0, 999))
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    arguments = {"x": normal(batch, length, channels), "weight": normal(3, rows, order), "collapse": normal(rows)}
    biased = draw(st.booleans())
    arguments |= {"bias": normal(3, rows) if biased else None, "collapse_bias": normal(1) if biased else None}
    options = {"theta": draw(st.sampled_from([3.0, 20.0, 77.5])), "scale": draw(st.sampled_from([1.0, 0.3]))}
    if draw(st.booleans()):
        options["initial_state"] = normal(batch, order, channels)
    if draw(st.booleans()):
        options["lengths"] = torch.randint(0, length + 1, (batch,), generator=random)
    if draw(st.booleans()):
        options["seq_idx"] = (torch.rand(batch, length, generator=random) < 0.1).cumsum(1)
    return arguments, options


def real(y, lengths):
    if lengths is None:
        return y
    return torch.where((torch.arange(y.shape[1]) < lengths[:, None]).unsqueeze(2), y, 0)


def results_of(leaves, options, **extra):
    """Output, memory and gradients, in float64."""
    y, state = implicit_attention(**leaves, **options, **extra, return_final_state=True)
    y = real(y, options.get("lengths"))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = (y * weights).sum() + state.sin().sum()
    wanted = [leaf for leaf in leaves.values() if leaf is not None]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [result.detach().double() for result in (y, state, *gradients)]


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_forms_equal_the_reference_with_gradients(problem):
    arguments, options = problem
    leaves = {name: None if t is None else t.requires_grad_() for name, t in arguments.items()}
    if "initial_state" in options:
        leaves["initial_state"] = options["initial_state"].requires_grad_()
        options = {name: value for name, value in options.items() if name != "initial_state"}
    wanted = results_of(leaves, options, backend="reference")
    for form in ("chunked", "fft", "recurrent"):
        for got, want in zip(results_of(leaves, options, form=form), wanted):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, msg=lambda text, form=form: f"{form}: {text}")


needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(problem=problems(), order=st.sampled_from([6, 33]), rows=st.sampled_from([3, 22]), channels=st.integers(1, 70))
def test_kernel_equals_the_reference_with_gradients(problem, order, rows, channels):
    arguments, options = problem
    options = {name: value for name, value in options.items() if name != "initial_state"}
    random = torch.Generator().manual_seed(rows)
    shapes = {"x": (*arguments["x"].shape[:2], channels), "weight": (3, rows, order), "collapse": (rows,)}
    shapes |= {"bias": (3, rows), "collapse_bias": (1,)} if arguments["bias"] is not None else {}
    tensors = {name: torch.randn(shape, generator=random) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    leaves = {name: None if t is None else tensors[name].requires_grad_() for name, t in arguments.items()}
    wide = {name: None if t is None else t.detach().double().requires_grad_() for name, t in leaves.items()}
    wanted = results_of(wide, options, backend="reference")
    for tokens in (None, 37):  # of one transform; many transforms a row if few
        with pytest.MonkeyPatch.context() as patch:
            if tokens is not None:
                patch.setattr(
                    native, "transform_sizes", lambda length, taps, tokens=tokens: (256, min(length, tokens))
                )
            got = results_of(leaves, options, backend="native", form="fft")
        for g, want in zip(got, wanted):
            torch.testing.assert_close(g, want, rtol=1e-4, atol=2e-5 * max(1.0, want.abs().max().item()))


@needs_compiler
def test_kernel_of_the_largest_preset_is_as_exact_as_float32():
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 900, 40, generator=random), torch.randn(3, 22, 220, generator=random) * 220**-0.5
    collapse = torch.randn(22, generator=random)
    y, _ = implicit_attention(x, weight, None, collapse, theta=350.0, backend="native", form="fft")
    exact, _ = implicit_attention(x.double(), weight.double(), None, collapse.double(), theta=350.0)
    product, _ = implicit_attention(x, weight, None, collapse, theta=350.0, backend="torch")
    assert (y - exact).norm() <= 2 * (product - exact).norm()


@needs_compiler
@pytest.mark.parametrize(("channels", "order", "rows"), [(3, 6, 2), (40, 33, 5), (70, 50, 22)])
def test_decoding_from_a_memory_that_lags(channels, order, rows):
    """More tokens than a block, rows that are not in step, and the memory settled in between."""
    torch.manual_seed(0)
    layer, batch = ImplicitAttention(order, rows, 30.0, activation=F.gelu), 2
    x = torch.randn(batch, 80, channels)
    with torch.no_grad():
        expected, _ = layer.double()(x.double(), {})
        layer.float()
        _, states = layer(x[:, :5], {}, ENDS)
        for t in range(5, 80):
            before = {name: state.clone() for name, state in states.items()}
            y, after = layer(x[:, t : t + 1], states, STEP)
            assert all(torch.equal(states[name], before[name]) for name in before)  # another may go on from these
            torch.testing.assert_close(y[:, 0].double(), expected[:, t], rtol=1e-4, atol=1e-5)
            states = after
            if t == 20:  # settle the second row alone, so that the rows advance at different tokens
                memory = apply_deferred(DeferredMemory(**states), layer.theta)
                settled = defer_updates(memory)._asdict()
                states = {name: torch.stack([states[name][0], settled[name][1]]) for name in states}
    _, exact = layer.double()(x.double(), {}, ENDS)
    torch.testing.assert_close(
        apply_deferred(DeferredMemory(**states), 30.0).double(), exact["memory"], rtol=1e-4, atol=1e-5
    )


@needs_compiler
def test_decoding_states_in_any_layout():
    """What reorders a cache may leave states that are not contiguous."""
    torch.manual_seed(0)
    layer, x = ImplicitAttention(20, 4, 30.0, activation=F.gelu), torch.randn(3, 1, 9)
    with torch.no_grad():
        _, states = layer(torch.randn(3, 40, 9), {}, ENDS)
        other = {name: state.movedim(0, -1).contiguous().movedim(-1, 0) for name, state in states.items()}
        assert not other["memory"].is_contiguous() and not other["recent"].is_contiguous()
        for _ in range(3):
            (y, states), (found, other) = (layer(x, s, STEP) for s in (states, other))
            torch.testing.assert_close((found, other), (y, states), rtol=0, atol=0)


@needs_compiler
def test_kernel_keeps_float32_under_autocast():
    """In the forward, the backward, and decoding."""
    torch.manual_seed(0)
    layer, x = ImplicitAttention(20, 4, 30.0, activation=F.gelu), torch.randn(2, 40, 9, requires_grad=True)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y, states = layer(x, {}, ENDS)
            memory = states["memory"]
            results.append(
                [y, memory, *torch.autograd.grad(y.square().sum() + memory.sum(), [x, *layer.parameters()])]
            )
            with torch.no_grad():
                results[-1].append(layer(x[:, :1], states, STEP))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@needs_compiler
def test_decoding_compiled_equals_eager():
    torch.manual_seed(0)
    layer = ImplicitAttention(20, 4, 30.0, activation=F.gelu)
    run = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        _, states = layer(torch.randn(2, 40, 9), {}, ENDS)
        x = torch.randn(2, 1, 9)
        (y, after), (want, wanted) = (f(x, states, STEP) for f in (run, layer))
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(after, wanted)


@pytest.mark.parametrize("length", [1, 7, 64, 700, 1024, 3000, 16384, 300_000])
@pytest.mark.parametrize("taps", [1, 64, 700, 9000])
def test_transforms_cover_a_row(length, taps):
    taps = min(taps, length)
    points, tokens = native.transform_sizes(length, taps)
    assert points & (points - 1) == 0 and 1 <= tokens <= length and points >= taps - 1 + tokens

    def operations(points: int) -> float:
        """Transforms of n points cost n log2 n; there is one for each piece of the row, and n more for its product."""
        pieces = math.ceil(length / min(length, points - taps + 1))
        return pieces * points * (math.log2(points) + 1)

    assert operations(points) == min(operations(2**k) for k in range(5, 22) if 2**k >= taps)


def test_filters_end_where_float32_sees_no_more():
    whole, kept = impulse_response(50, 350.0, 4096), finite_response(50, 350.0, 4096)
    assert 500 < kept.shape[1] < 1100
    assert (whole[:, kept.shape[1] :].abs().sum(1) <= 2.0**-26 * whole.abs().sum(1)).all()
    assert torch.equal(kept, whole[:, : kept.shape[1]].float())
    assert finite_response(50, 350.0, 100).shape == (50, 100)


@pytest.mark.parametrize("length", [70, 300])
def test_products_in_bfloat16_stay_near_float64(length):
    """The error is that of rounding what is read, it does not grow with the length: states are float32."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, length, 16, generator=random), torch.randn(3, 4, 50, generator=random) * 50**-0.5
    low = [t.bfloat16().requires_grad_() for t in (x, weight, torch.randn(4, generator=random))]
    wide = [t.detach().double().requires_grad_() for t in low]
    results = []
    for x, weight, collapse in (low, wide):
        y, _ = implicit_attention(x, weight, None, collapse, theta=60.0, scale=0.25, backend="torch")
        results.append([y, *torch.autograd.grad(y.double().square().sum(), (x, weight, collapse))])
    for got, want in zip(*results):
        assert (got.double() - want).norm() < 2e-2 * want.norm()


def test_groups_computed_again_equal_all_at_once(monkeypatch):
    x, weight, collapse, options = golden_layer()
    x = torch.cat([x, x.flip(1), x], 1).requires_grad_()
    results = []
    for held in (2**26, 0):
        monkeypatch.setattr(torch_backend, "HELD", held)
        monkeypatch.setattr(torch_backend, "GROUP", 1)
        y, _ = implicit_attention(x, weight, None, collapse, **options, backend="torch")
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), x)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(problem=problems(), cut=st.integers(0, 100))
def test_pieces_equal_the_whole(problem, cut):
    arguments, options = problem
    options = {name: value for name, value in options.items() if name not in ("seq_idx", "lengths")}
    x = arguments.pop("x")
    whole, end = implicit_attention(x, **arguments, **options, return_final_state=True)
    cut = min(cut, x.shape[1])
    first, state = implicit_attention(x[:, :cut], **arguments, **options, return_final_state=True)
    second, last = implicit_attention(
        x[:, cut:], **arguments, **options | {"initial_state": state}, return_final_state=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(last, end, rtol=1e-9, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_memory_equals_the_reference_and_steps(problem):
    arguments, options = problem
    x, order = arguments["x"], arguments["weight"].shape[2]
    options = {"order": order, **{name: value for name, value in options.items() if name != "scale"}}
    got = legendre_memory(x, **options, return_final_state=True)
    want = legendre_memory(x, **options, return_final_state=True, backend="reference")
    lengths = options.get("lengths")
    torch.testing.assert_close(
        real(got[0].flatten(2), lengths), real(want[0].flatten(2), lengths), rtol=1e-9, atol=1e-11
    )
    torch.testing.assert_close(got[1], want[1], rtol=1e-9, atol=1e-11)
    sizes, state = {"order": order, "theta": options["theta"]}, None
    whole, _ = legendre_memory(x, **sizes)
    for t in range(min(x.shape[1], 5)):
        y, state = legendre_memory(x[:, t : t + 1], **sizes, initial_state=state, return_final_state=True)
        torch.testing.assert_close(y[:, 0], whole[:, t], rtol=1e-9, atol=1e-11)


def test_gradcheck():
    random = torch.Generator().manual_seed(0)
    shapes = [(1, 6, 2), (3, 2, 4), (3, 2), (2,), (1,)]
    leaves = [torch.randn(*s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]
    torch.autograd.gradcheck(lambda *a: implicit_attention(*a, theta=5.0)[0], leaves)


def test_constants_first_needed_inside_a_transform_serve_outside_of_it():
    x, options = torch.ones(1, 70, 2, dtype=torch.float64), {"order": 7, "theta": 11.25}
    torch.func.grad(lambda x: legendre_memory(x, **options)[0].sum())(x)
    y, expected = (legendre_memory(x, **options, backend=name)[0] for name in ("torch", "reference"))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-11)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(transition(7, 11.25))


def test_the_future_is_multiplied_by_exact_zeros():
    x, weight, collapse, options = golden_layer()
    changed = x.clone()
    changed[:, 20:] *= 1e6
    y, again = (implicit_attention(v, weight, None, collapse, **options)[0] for v in (x, changed))
    assert torch.equal(y[:, :20], again[:, :20])
    assert not torch.allclose(y[:, 20], again[:, 20])


def test_lower_precision_keeps_a_float32_state():
    x, weight, collapse, options = golden_layer()
    exact, _ = implicit_attention(x, weight, None, collapse, **options)
    low = [t.to(torch.bfloat16) for t in (x, weight, collapse)]
    y, state = implicit_attention(low[0], low[1], None, low[2], **options, return_final_state=True)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=5e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 0.0}, "theta"),
        ({"theta": math.inf}, "theta must be positive and finite, got inf"),
        ({"theta": 5.0, "form": "rk4"}, "'chunked', 'fft', 'recurrent'"),
        ({"theta": 5.0, "initial_state": torch.zeros(1, 5, 3, dtype=torch.float64)}, "initial_state"),
        ({"theta": 5.0, "lengths": torch.tensor([50])}, "lengths"),
    ],
)
def test_bad_input(options, message):
    x, weight, collapse, _ = golden_layer()
    with pytest.raises(ValueError, match=message):
        implicit_attention(x, weight, None, collapse, **options)


@pytest.mark.parametrize("order", [0, 2.5])
def test_bad_order(order):
    with pytest.raises(ValueError, match=rf"order must be .*got {order}"):
        legendre_memory(torch.zeros(2, 6, 4), order=order, theta=9.0)
