"""The Longhorn scan: golden numbers, every backend against the float64 reference, properties, extremes, refusals."""

import pytest
import torch

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from tests.row_options import longhorn_scan

F64 = torch.float64
OPTIONAL = ("beta_bias", "D", "z", "initial_state")
NATIVE = pytest.param("native", marks=pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler"))


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=F64)


# The worked example: D = 2, N = 3, L = 4, all numbers rational.

GOLDEN = {
    "x": tensor([[[1, 2], [-1, 1], [2, 0], [1, -3]]]),
    "beta_logit": -torch.log(tensor([[[1, 2], [1 / 2, 1], [3, 1 / 3], [1, 1]]])),
    "k": tensor([[[1, 0, 1], [1 / 2, 1, -1], [0, 2, 1], [1, -1, 0]]]),
    "q": tensor([[[1, 1, 0], [1, 0, 2], [0, 1, -1], [1 / 2, 1, 1]]]),
}
SKIP = tensor([1, 1 / 2])
GOLDEN_Y = tensor([[[5 / 4, 7 / 5], [0, 193 / 170], [226 / 135, 44 / 1615], [253 / 144, -10533 / 12920]]])
GOLDEN_STATE = tensor([[[13 / 40, -1 / 36, 28 / 45], [-129 / 340, 1053 / 1292, 96 / 1615]]])
GATE = tensor([[[0, 1], [1, -1], [2, 0.5], [-2, 3]]])
GATED_Y = tensor(
    [[[0, 1.023482010082007], [0, -0.305327613672994], [2.949039105525947, 0.008479322158787],
      [-0.418865823216607, -2.329751535097683]]]
)  # fmt: skip
START = tensor([[[1, 0, -1], [2, 1, 0]]])
STARTED_Y = tensor([[[2, 4], [-2 / 5, 449 / 170], [292 / 135, 499 / 1615], [551 / 360, -507 / 12920]]])
STARTED_STATE = tensor([[[17 / 20, -1 / 36, 2 / 15], [3 / 4, 39 / 38, 96 / 1615]]])


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_golden_outputs(backend):
    def scan(**options):
        return longhorn_scan(**GOLDEN, D=SKIP, return_final_state=True, backend=backend, **options)

    def close(value, expected, tolerance=1e-14):
        torch.testing.assert_close(value, expected, rtol=0, atol=tolerance)

    y, state = scan()
    close(y, GOLDEN_Y)
    close(state, GOLDEN_STATE)
    close(scan(z=GATE)[0], GATED_Y)
    y, state = scan(initial_state=START)
    close(y, STARTED_Y)
    close(state, STARTED_STATE)
    y, state = scan(seq_idx=torch.tensor([[0, 0, 1, 1]]))
    close(y[:, :2], GOLDEN_Y[:, :2])
    close(y[:, 2:], tensor([[[20 / 9, 0], [103 / 72, -9 / 8]]]))
    close(state, tensor([[[1 / 4, 1 / 12, 2 / 9], [-3 / 4, 3 / 4, 0]]]))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_golden_gradients(backend):
    inputs = {name: value.clone().requires_grad_() for name, value in GOLDEN.items()}
    skip, start = SKIP.clone().requires_grad_(), torch.zeros(1, 2, 3, dtype=F64, requires_grad=True)
    longhorn_scan(**inputs, D=skip, initial_state=start, backend=backend)[0].sum().backward()
    expected = {
        "x": [[31 / 16, 43 / 34], [491 / 540, 443 / 1292], [25 / 18, 20 / 19], [7 / 8, 3 / 8]],
        "beta_logit": [
            [15 / 64, 52 / 85],
            [-283 / 32400, -488 / 5491],
            [133 / 405, -84 / 6137],
            [-457 / 8640, 3767 / 51680],
        ],
        "k": [
            [3329 / 8160, 715439 / 697680, -49 / 480],
            [-7021771 / 44477100, 4675753 / 44477100, 16354607 / 44477100],
            [1 / 12, 186781 / 2982582, -1020082 / 7456455],
            [-611899 / 1395360, -124891 / 465120, -1 / 2],
        ],
        "q": [
            [13 / 20, 0, 13 / 20],
            [101 / 170, -8 / 255, 177 / 340],
            [101 / 170, 3340 / 8721, 9908 / 14535],
            [-37 / 680, 4577 / 5814, 9908 / 14535],
        ],
    }
    for name, rows in expected.items():
        torch.testing.assert_close(inputs[name].grad[0], tensor(rows), rtol=0, atol=1e-13, msg=name)
    torch.testing.assert_close(skip.grad, tensor([3, 0]), rtol=0, atol=1e-13)
    rows = [[137 / 80, 185 / 108, 11 / 10], [156 / 85, 1929 / 1292, 104 / 85]]
    torch.testing.assert_close(start.grad[0], tensor(rows), rtol=0, atol=1e-13)


# Backends against the reference


def draw(batch, length, channels, states, seed=0, given=OPTIONAL, scale=1.0, heads=()) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64) * scale

    inputs = {
        "x": randn(batch, length, channels), "beta_logit": randn(batch, length, channels),
        "k": randn(batch, length, *heads, states), "q": randn(batch, length, *heads, states),
        "beta_bias": randn(channels), "D": randn(channels), "z": randn(batch, length, channels),
        "initial_state": randn(batch, channels, states),
    }  # fmt: skip
    return {name: value for name, value in inputs.items() if name not in OPTIONAL or name in given}


def outputs_and_gradients(inputs, backend, dtype=F64, rows=None, **options):
    """y, final state, and every gradient, in float64; `rows` (B, L, 1) marks the outputs that mean something."""
    leaves = {name: value.to(dtype).detach().clone().requires_grad_() for name, value in inputs.items()}
    y, state = longhorn_scan(**leaves, return_final_state=True, backend=backend, **options)
    rows = torch.ones_like(y[..., :1]) if rows is None else rows.to(y.dtype)
    weights = torch.linspace(-1, 2, y.numel(), dtype=F64).view(y.shape).to(y.dtype)
    state_weights = torch.linspace(2, -1, state.numel(), dtype=F64).view(state.shape).to(state.dtype)
    ((y * weights * rows).sum() + (state * state_weights).sum()).backward()
    results = {"y": y * rows, "state": state} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {name: value.detach().to(F64) for name, value in results.items()}


SUMMED = {"dbeta_bias": "dbeta_logit"}  # over rows and tokens, whose terms may cancel


def assert_near(results, expected, tolerance):
    for name, value in expected.items():
        largest = max(value.abs().max(), expected.get(SUMMED.get(name), value).abs().max()).clamp(min=1e-3)
        error = (results[name] - value).abs().max() / largest
        assert error <= tolerance, f"{name}: {error:.1e} of the largest entry, {tolerance:.0e} allowed"


@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE])
@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_scans_beside_each_other(backend, packed):
    """With every option; and each head's channels are what they are alone."""
    dtype = torch.float32 if backend == "native" else F64
    inputs = draw(2, 21, 12, 5, heads=(3,))
    options = {"seq_idx": torch.tensor([[0] * 9 + [1] * 12] * 2)} if packed else {"lengths": torch.tensor([21, 13])}
    rows = None if packed else (torch.arange(21) < options["lengths"][:, None])[..., None]
    expected = outputs_and_gradients(inputs, "reference", rows=rows, **options)
    assert_near(outputs_and_gradients(inputs, backend, dtype, rows, **options), expected, 1e-5)
    for head in range(3):
        channels = slice(4 * head, 4 * head + 4)
        alone = {name: value[:, :, head] if name in "kq" else value[..., channels] for name, value in inputs.items()}
        alone["initial_state"] = inputs["initial_state"][:, channels]
        alone = {name: value.to(dtype) for name, value in alone.items()}
        y, state = longhorn_scan(**alone, **options, return_final_state=True, backend=backend)
        y = y if rows is None else torch.where(rows, y, 0.0)
        torch.testing.assert_close(y.to(F64), expected["y"][..., channels], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state.to(F64), expected["state"][:, channels], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "reference", NATIVE])
@pytest.mark.parametrize("heads", [(), (2,)], ids=str)
def test_nan_in_padding_reaches_no_state(backend, heads):
    inputs = {name: value.float() for name, value in draw(2, 6, 4, 3, heads=heads).items()}
    options = {"lengths": torch.tensor([6, 4]), "return_final_state": True, "backend": backend}
    expected = longhorn_scan(**inputs, **options)
    for name in ("x", "beta_logit", "k", "q", "z"):
        inputs[name][1, 4:] = torch.nan
    y, state = longhorn_scan(**inputs, **options)
    torch.testing.assert_close(state, expected[1])
    torch.testing.assert_close(y[1, :4], expected[0][1, :4])


@pytest.mark.parametrize("backend", ["torch", "reference", NATIVE])
def test_documents_of_padding_reset_no_state(backend):
    inputs = {name: value.float() for name, value in draw(1, 6, 4, 3).items()}
    options = {"lengths": torch.tensor([4]), "return_final_state": True, "backend": backend}
    _, expected = longhorn_scan(**inputs, **options, seq_idx=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    _, state = longhorn_scan(**inputs, **options, seq_idx=torch.tensor([[0, 0, 1, 1, 2, 3]]))
    torch.testing.assert_close(state, expected)


@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
def test_half_precision(backend, dtype, heads):
    rounded = {name: value.to(dtype).to(F64) for name, value in draw(2, 70, 24, 16, scale=0.5, heads=heads).items()}
    y, state = longhorn_scan(
        **{name: value.to(dtype) for name, value in rounded.items()}, return_final_state=True, backend=backend
    )
    expected, expected_state = longhorn_scan(**rounded, return_final_state=True, backend="reference")
    assert y.dtype == dtype
    assert state.dtype == torch.float32
    # inside all is float32: only the one rounding of the output remains
    torch.testing.assert_close(y.to(F64), expected, rtol=2 ** (-8 if dtype == torch.bfloat16 else -11), atol=1e-5)
    torch.testing.assert_close(state.to(F64), expected_state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "torch", NATIVE])
def test_a_zero_key_leaves_the_state_bit_for_bit(backend):
    inputs = {name: value.float() for name, value in draw(2, 30, 6, 16).items()}
    inputs["k"].zero_()
    state = longhorn_scan(**inputs, return_final_state=True, backend=backend)[1]
    assert torch.equal(state, inputs["initial_state"])


# Extremes


@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("logit", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_logits(backend, logit):
    inputs = draw(1, 20, 4, 16, given=("initial_state",))
    inputs["beta_logit"] = torch.full_like(inputs["beta_logit"], logit)
    results = outputs_and_gradients(inputs, backend, torch.float32)
    assert all(torch.isfinite(value).all() for value in results.values())
    assert_near(results, outputs_and_gradients(inputs, "reference"), 3e-6)


@pytest.mark.parametrize("backend", ["torch", NATIVE])
@pytest.mark.parametrize("size", [1e-6, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("one_hot", [False, True])
def test_extreme_keys(backend, size, one_hot):
    inputs = draw(1, 40, 4, 16, given=("initial_state",))
    if one_hot:
        hits = torch.arange(40) % 5
        inputs["k"] = torch.nn.functional.one_hot(hits, 16).to(F64)[None] * size
    else:
        inputs["k"] = inputs["k"] * size
    results = outputs_and_gradients(inputs, backend, torch.float32)
    expected = outputs_and_gradients(inputs, "reference")
    assert all(torch.isfinite(value).all() for value in results.values())
    assert_near(*({name: found[name] for name in ("dbeta_logit", "y")} for found in (results, expected)), 2e-5)


# Cost


@pytest.mark.parametrize("backend", ["torch", NATIVE])
def test_saves_no_state_per_token(backend):
    saved = []

    def count(tensor):
        saved.append(tensor.numel())
        return tensor

    batch, length, channels, states = 1, 512, 32, 16
    leaves = {name: value.float().requires_grad_() for name, value in draw(batch, length, channels, states).items()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        longhorn_scan(**leaves, backend=backend)
    assert max(saved) <= batch * length * max(channels, states) * 2
    assert sum(saved) < batch * length * channels * states


def test_compiles_into_one_graph():
    inputs = {name: value.float() for name, value in draw(1, 20, 4, 3).items()}
    compiled = torch.compile(longhorn_scan, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs)[0], longhorn_scan(**inputs)[0])


# Refusals


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "x must be a tensor"),
        ({"x": torch.zeros(2, 4)}, ValueError, r"x must have shape \(B, L, D\)"),
        ({"x": torch.zeros(2, 6, 4, dtype=torch.int64)}, TypeError, "floating point"),
        ({"k": torch.zeros(2, 5, 3, dtype=F64)}, ValueError, r"k must have shape .* got \(2, 5, 3\)"),
        ({"q": torch.zeros(2, 6, 4, dtype=F64)}, ValueError, "q must have shape"),
        (
            {"k": torch.zeros(2, 6, 3, 3, dtype=F64)},
            ValueError,
            "k has 3 heads, which must divide the 4 channels of x",
        ),
        ({"k": torch.zeros(2, 6, 0, 3, dtype=F64)}, ValueError, "k has 0 heads"),
        ({"k": torch.zeros(2, 6, 2, 3, dtype=F64)}, ValueError, r"q must have shape \(B, L, H, N\) = \(2, 6, 2, 3\)"),
        ({"beta_logit": torch.zeros(2, 6, 4)}, TypeError, "beta_logit must have dtype torch.float64"),
        ({"beta_bias": torch.zeros(5)}, ValueError, "beta_bias"),
        ({"D": torch.zeros(1, 4)}, ValueError, "D must have shape"),
        ({"z": torch.zeros(2, 6, 3, dtype=F64)}, ValueError, "z must have shape"),
        ({"initial_state": torch.zeros(1, 4, 3)}, ValueError, "initial_state"),
        ({"seq_idx": torch.zeros(2, 6)}, TypeError, "seq_idx"),
        ({"seq_idx": torch.tensor([[0, 1, 1, 0, 0, 0]] * 2)}, ValueError, "decrease"),
        ({"lengths": torch.tensor([1, 7])}, ValueError, "lengths"),
        ({"backend": "cuda"}, ValueError, "'cuda' is not a backend"),
        ({"backend": "triton"}, ValueError, "forced but cannot run"),
    ],
)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        longhorn_scan(**{**draw(2, 6, 4, 3, given=()), **change})


def test_native_refuses_float64():
    with pytest.raises(ValueError, match="float64"):
        longhorn_scan(**draw(1, 3, 4, 3), backend="native")


@pytest.mark.parametrize("backend", ["torch", NATIVE])
def test_same_bits_every_time(backend):
    inputs = draw(2, 100, 40, 16)
    runs = [outputs_and_gradients(inputs, backend, torch.float32) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
