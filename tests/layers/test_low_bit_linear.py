"""Linear maps of 8 and 4 bits against the float64 product of the weight that their codes stand for."""

import copy
import os
import platform
import subprocess
import sys

import pytest
import torch

from hf_hybrid_ssm.layers import low_bit_linear
from hf_hybrid_ssm.layers.int4_layout import known_layout
from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}


def linear_of(out_features=40, in_features=128, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(in_features, out_features, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 5), (1, 17), (1, 70)], ids=str)
@pytest.mark.parametrize(("bits", "group_size"), [(8, 32), (4, 32), (4, 64), (4, 128)])
def test_product(bits, group_size, shape, dtype):
    linear = linear_of(dtype=dtype)
    rounded = LowBitLinear.from_linear(linear, bits=bits, group_size=group_size)
    inputs = torch.randn(*shape, linear.in_features).to(dtype)
    expected = inputs.double() @ rounded.dequantized().T + linear.bias.double()
    outputs = rounded(inputs)
    assert outputs.dtype == dtype and outputs.shape == expected.shape
    torch.testing.assert_close(outputs.double(), expected, rtol=0, atol=TOLERANCES[dtype] * 2)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("bits", "widths"), [(8, (1, 2, 3, 7, 8, 15, 17, 24, 31, 36, 50, 63, 80)), (4, (32, 96))], ids=["8", "4"]
)
def test_product_of_every_width(bits, widths, dtype):
    """Torch's kernels read rows in vectors: what is left beyond whole vectors counts too, and nothing else."""
    for in_features in widths:
        for out_features in (1, 3, 16, 37, 200):
            linear = linear_of(out_features, in_features, dtype)
            rounded = LowBitLinear.from_linear(linear, bits=bits)
            for rows in (1, 3, 16, 65):
                inputs = torch.randn(rows, in_features).to(dtype)
                expected = inputs.double() @ rounded.dequantized().T + linear.bias.double()
                torch.testing.assert_close(rounded(inputs).double(), expected, rtol=0, atol=TOLERANCES[dtype] * 2)


@pytest.mark.parametrize("bits", [8, 4])
def test_nearest_codes(bits):
    linear = linear_of()
    weight = linear.weight.detach().double()
    rounded = LowBitLinear.from_linear(linear, bits=bits).dequantized()
    if bits == 8:
        step = weight.abs().amax(1, keepdim=True) / 127
    else:
        groups = weight.view(len(weight), -1, 32)
        step = ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(32, 1)
    assert ((rounded - weight).abs() <= step * 0.501).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_weights_and_zeros(bits):
    linear = linear_of()
    linear.weight.data[0], linear.weight.data[1] = 0.0, 0.25
    rounded = LowBitLinear.from_linear(linear, bits=bits).dequantized()
    torch.testing.assert_close(rounded[:2], linear.weight[:2].detach().double(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_state_dict_is_unpacked(bits):
    """What is saved does not depend on the processor, and may be loaded into a map that ran already."""
    rounded = LowBitLinear.from_linear(linear_of(), bits=bits)
    saved = copy.deepcopy(rounded.state_dict())
    inputs = torch.randn(3, 128)
    expected = rounded(inputs)
    assert rounded.is_packed == (bits == 4)
    for key, value in rounded.state_dict().items():
        assert torch.equal(value, saved[key]), key
    other = LowBitLinear.from_linear(linear_of(), bits=bits)
    other.weight_codes.zero_()
    other(inputs)
    other.load_state_dict(saved)
    assert torch.equal(other(inputs), expected)


ON_A_PROCESSOR = """
import torch
from hf_hybrid_ssm.layers.int4_layout import known_layout
from hf_hybrid_ssm.layers.low_bit_linear import FEW_ROWS, LowBitLinear
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for out_features in (16, 48, 80, 200):
        rounded = LowBitLinear.from_linear(torch.nn.Linear(64, out_features).to(dtype), bits=4)
        saved = {name: value.clone() for name, value in rounded.state_dict().items()}
        for rows in (1, FEW_ROWS[4] + 1):
            inputs = torch.randn(rows, 64).to(dtype)
            expected = inputs.double() @ rounded.dequantized().T + rounded.bias.double()
            torch.testing.assert_close(rounded(inputs).double(), expected, rtol=0, atol=0.06)
        assert all(torch.equal(value, saved[name]) for name, value in rounded.state_dict().items())
print(*known_layout())
"""


@pytest.mark.parametrize(
    ("capability", "layout"), [("avx2", "32 True"), ("default", "32 False")], ids=["AVX2", "none"]
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these processors are of the x86 family")
def test_layouts_of_other_processors(capability, layout):
    """Codes of 4 bits are recognised in every order that torch has, without the kernel's help."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", ON_A_PROCESSOR]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == layout


def test_unknown_layout(monkeypatch):
    """Where no layout gives back what was packed, the kernel multiplies all rows, and reads its own codes."""
    assert known_layout() is not None
    rounded = LowBitLinear.from_linear(linear_of(), bits=4)
    saved = copy.deepcopy(rounded.state_dict())
    inputs = torch.randn(100, 128)
    expected = rounded(inputs)
    monkeypatch.setattr(low_bit_linear, "known_layout", lambda: None)
    monkeypatch.setattr(rounded, "_product", None)
    torch.testing.assert_close(rounded(inputs), expected, rtol=0, atol=1e-5)
    for key, value in rounded.state_dict().items():
        assert torch.equal(value, saved[key]), key


@pytest.mark.parametrize("bits", [8, 4])
def test_compiled(bits):
    """In one graph for few rows and in one for many."""
    rounded = LowBitLinear.from_linear(linear_of(dtype=torch.bfloat16), bits=bits)
    rounded.pack()
    compiled = torch.compile(rounded, backend="aot_eager", fullgraph=True)
    for rows in (1, 100, 200):
        inputs = torch.randn(rows, 128).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs), rounded(inputs))


def test_refused():
    with pytest.raises(ValueError, match="bits must be 8 or 4, got 2"):
        LowBitLinear(64, 16, bits=2)
    with pytest.raises(ValueError, match="group_size must be one of 32, 64, 128, 256, got 16"):
        LowBitLinear(64, 16, bits=4, group_size=16)
    with pytest.raises(ValueError, match="in_features=48 must be a multiple of group_size=32"):
        LowBitLinear(48, 16, bits=4)
    rounded = LowBitLinear.from_linear(linear_of(), bits=4)
    with pytest.raises(TypeError, match=r"inputs must be float32, bfloat16 or float16, got torch\.float64"):
        rounded(torch.ones(1, 128, dtype=torch.float64))
    with pytest.raises(ValueError, match="weights of 4 bits are for CPUs; the inputs are on meta"):
        rounded(torch.ones(1, 128, device="meta"))
    with pytest.raises(NotImplementedError, match="weights of 4 bits give no gradient"):
        rounded(torch.ones(1, 128, requires_grad=True))
