"""The short causal convolution against its reference, torch's own convolution, and its refusals."""

import pytest
import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.native_library import missing_compiler
from tests.row_options import causal_conv

F64 = torch.float64
needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason="no C compiler")


def draw(batch, length, channels, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (batch, length, channels), "weight": (channels, width), "bias": (channels,)}
    shapes["initial_state"] = (batch, width - 1, channels)
    return {name: torch.randn(*shape, generator=generator, dtype=F64) for name, shape in shapes.items()}


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_equals_a_padded_convolution(backend):
    inputs = draw(2, 11, 5, 4)
    inputs.pop("initial_state")
    y, state = causal_conv(**inputs, activation="silu", return_final_state=True, backend=backend)
    padded = F.pad(inputs["x"].transpose(1, 2), (3, 0))
    expected = F.silu(F.conv1d(padded, inputs["weight"].unsqueeze(1), inputs["bias"], groups=5)).transpose(1, 2)
    torch.testing.assert_close(y, expected)
    assert torch.equal(state, inputs["x"][:, -3:])


def test_half_precision_rounds_once():
    inputs = {name: value.to(torch.bfloat16) for name, value in draw(2, 30, 8, 4).items()}
    y, state = causal_conv(**inputs, activation="silu", return_final_state=True)
    expected = causal_conv(**{name: v.to(F64) for name, v in inputs.items()}, activation="silu", backend="reference")[
        0
    ]
    assert y.dtype == state.dtype == torch.bfloat16
    torch.testing.assert_close(y.to(F64), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 3)}, ValueError, r"x must have shape \(B, L, D\)"),
        ({"weight": torch.zeros(4, 4, dtype=F64)}, ValueError, "weight must have shape"),
        ({"weight": torch.zeros(3, 0, dtype=F64), "initial_state": None}, ValueError, "at least one tap|K - 1"),
        ({"bias": torch.zeros(2, dtype=F64)}, ValueError, "bias"),
        ({"initial_state": torch.zeros(2, 4, 3, dtype=F64)}, ValueError, "initial_state"),
        ({"activation": "relu"}, ValueError, "activation='relu'"),
        ({"seq_idx": torch.zeros(2, 5, dtype=torch.int64)}, ValueError, "seq_idx"),
        ({"lengths": torch.tensor([1, 9])}, ValueError, "lengths"),
    ],
)
def test_refusals(change, error, message):
    with pytest.raises(error, match=message):
        causal_conv(**{**draw(2, 6, 3, 4), **change})
