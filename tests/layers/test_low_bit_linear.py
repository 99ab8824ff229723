"""Linear maps of 8 and 4 bits against the float64 product of the weight that their codes stand for."""

import copy

import pytest
import torch

from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}


def linear_of(out_features=40, in_features=128, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(in_features, out_features, bias=bias).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (2, 5), (1, 70)], ids=str)
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
        for out_features in (1, 3, 16, 37):
            linear = linear_of(out_features, in_features, dtype)
            rounded = LowBitLinear.from_linear(linear, bits=bits)
            for rows in (1, 3, 16):
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
