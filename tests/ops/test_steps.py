"""The ops of decoding: one token of each row equals the op for whole rows, in place, in every backend."""

import pytest
import torch

from hf_hybrid_ssm.ops._core.dispatch import REGISTRY
from hf_hybrid_ssm.ops._core.native_library import missing_compiler
from hf_hybrid_ssm.ops.causal_conv import causal_conv, causal_conv_step
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan, longhorn_step

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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch, channels, width", [(1, 16, 4), (3, 37, 1), (2, 5, 2)])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_step_of_the_convolution(backend, batch, channels, width, activation):
    for dtype in dtypes(backend):
        x = draw(batch, 2 * channels, dtype=dtype)[:, channels:]  # rows that lie apart, as a projection's half does
        weight, bias = draw(channels, width, dtype=dtype), draw(channels, dtype=dtype)
        state = draw(batch, width - 1, channels, seed=1, dtype=dtype)
        options = {"activation": activation, "initial_state": state.clone(), "return_final_state": True}
        want = causal_conv(x.unsqueeze(1), weight, bias, backend="reference", **options)
        y = causal_conv_step(x, state, weight, bias, activation=activation, backend=backend)
        check((y, state), (want[0][:, 0], want[1]), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch, channels, states", [(1, 16, 16), (3, 37, 5), (2, 5, 33)])
@pytest.mark.parametrize("plain", [True, False])
def test_step_of_the_scan(backend, batch, channels, states, plain):
    for dtype in dtypes(backend):
        x, z = draw(batch, 2 * channels, dtype=dtype).chunk(2, -1)
        k, q = draw(batch, 2 * states, seed=1, dtype=dtype).chunk(2, -1)
        logit = draw(batch, channels, seed=2, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        state = draw(batch, channels, states, seed=3, dtype=wide)
        options = {} if plain else {"beta_bias": draw(channels, dtype=wide), "D": draw(channels, seed=4, dtype=wide)}
        rows = {} if plain else {"z": z.unsqueeze(1)}
        inputs = [part.unsqueeze(1) for part in (x, logit, k, q)]
        held = {"initial_state": state.clone(), "return_final_state": True}
        want = longhorn_scan(*inputs, **options, **rows, **held, backend="reference")
        options |= {} if plain else {"z": z}
        y = longhorn_step(x, logit, k, q, state, **options, backend=backend)
        check((y, state), (want[0][:, 0], want[1]), dtype)


@pytest.mark.parametrize("name", ["causal_conv_step", "longhorn_step"])
def test_self_checks(name):
    op = REGISTRY[name]
    for got, want in zip(
        op.builtin["torch"](**op.self_check_inputs()), op.builtin["reference"](**op.self_check_inputs())
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if missing_compiler() is None:
        assert op.explain("cpu", torch.float32)["native"] == "runs"


def test_steps_name_what_does_not_fit():
    with pytest.raises(ValueError, match=r"state must have shape \(B, K - 1, D\) = \(1, 3, 4\)"):
        causal_conv_step(draw(1, 4), draw(1, 2, 4), draw(4, 4))
    with pytest.raises(ValueError, match="activation='relu'"):
        causal_conv_step(draw(1, 4), draw(1, 3, 4), draw(4, 4), activation="relu")
    with pytest.raises(ValueError, match=r"k must have shape \(B, N\) = \(1, 3\)"):
        longhorn_step(draw(1, 4), draw(1, 4), draw(1, 2), draw(1, 3), draw(1, 4, 3))
    with pytest.raises(TypeError, match="q must have dtype"):
        longhorn_step(draw(1, 4), draw(1, 4), draw(1, 3), draw(1, 3).double(), draw(1, 4, 3))
