"""Linear maps of 8 and 4 bits against the float64 product of the weight that their codes stand for."""

import copy
import os
import platform
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from hf_hybrid_ssm.layers import low_bit_kernels, low_bit_linear
from hf_hybrid_ssm.layers.low_bit_kernels import known_layout
from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.ops.int8_product import torch_backend

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}


def linear_of(out_features=40, in_features=128, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(in_features, out_features, bias=bias).to(dtype)


EVERY_WIDTH = (1, 2, 3, 7, 8, 15, 17, 24, 31, 36, 50, 63, 80)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("bits", "group_size", "widths"),
    [(8, 32, (*EVERY_WIDTH, 128)), (4, 32, (32, 96, 128)), (4, 64, (128,)), (4, 128, (128,))],
)
def test_product(bits, group_size, widths, dtype):
    """Torch's kernels read rows in vectors: what is left beyond whole vectors counts too, and nothing else."""
    for in_features in widths:
        for out_features in (1, 3, 16, 37, 40, 200):
            linear = linear_of(out_features, in_features, dtype)
            rounded = LowBitLinear.from_linear(linear, bits=bits, group_size=group_size)
            for shape in ((0,), (1,), (3,), (2, 5), (16,), (1, 70)):
                inputs = torch.randn(*shape, in_features).to(dtype)
                expected = inputs.double() @ rounded.dequantized().T + linear.bias.double()
                outputs = rounded(inputs)
                assert outputs.dtype == dtype and outputs.shape == expected.shape
                torch.testing.assert_close(outputs.double(), expected, rtol=0, atol=TOLERANCES[dtype] * 2)


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


def apart(tensor):
    """The same numbers one element behind an aligned address, as in a view or a mapped file."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].copy_(tensor.flatten()).view(tensor.shape)


def from_a_file(state, folder):
    """Tensors that begin where a mapped file has them."""
    names = {"at": torch.zeros(1, dtype=torch.uint8)} | state  # so that the next ones lie at odd addresses
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in names.items()}, folder / "file")
    loaded = safetensors.torch.load_file(folder / "file")
    return {name: loaded[name] for name in state}


def in_bits_of_a_mapped_archive(state, folder):
    torch.save({name: apart(tensor) for name, tensor in state.items()}, folder / "archive")
    return torch.load(folder / "archive", mmap=True, weights_only=True)


def replaced_data(rounded, state, folder):
    for name, tensor in state.items():
        if name != "bias" and rounded.get_buffer(name).shape == tensor.shape:
            rounded.get_buffer(name).data = apart(tensor)
        else:
            setattr(rounded, name, torch.nn.Parameter(tensor, False) if name == "bias" else apart(tensor))


def packed_data(rounded, state, folder):
    rounded.load_state_dict(state)
    rounded.weight_codes.data = apart(rounded.weight_codes)


def copied(rounded, state, folder):
    replaced_data(rounded, state, folder)
    rounded.__dict__ = copy.deepcopy(rounded).__dict__


def shared(rounded, state, folder):
    replaced_data(rounded, state, folder)
    rounded.share_memory()


def not_contiguous(rounded, state, folder):
    rounded.load_state_dict(state)
    rounded.weight_codes = state["weight_codes"].T.contiguous().T
    rounded.weight_scales = torch.stack([state["weight_scales"], state["weight_scales"]], -1)[..., 0]


WAYS = {
    "load_state_dict": lambda rounded, state, folder: rounded.load_state_dict({n: apart(t) for n, t in state.items()}),
    "assign": lambda rounded, state, folder: rounded.load_state_dict(
        {name: apart(tensor) for name, tensor in state.items()}, assign=True
    ),
    "safetensors": lambda rounded, state, folder: rounded.load_state_dict(from_a_file(state, folder), assign=True),
    "mmap": lambda rounded, state, folder: rounded.load_state_dict(
        in_bits_of_a_mapped_archive(state, folder), assign=True
    ),
    "data": replaced_data,
    "data of packed codes": packed_data,
    "deepcopy": copied,
    "share_memory": shared,
    "not contiguous": not_contiguous,
}


@pytest.fixture
def handed_over(monkeypatch):
    """What torch's kernels are given; each call is looked at before they are."""
    calls = []

    def checked(kernel):
        def call(inputs, codes, *others):
            scales = others[-1]
            for name, tensor in {"inputs": inputs, "codes": codes, "scales": scales}.items():
                assert tensor.is_contiguous() and tensor.data_ptr() % torch_backend.ALIGNMENT == 0, name
            assert scales.untyped_storage().nbytes() // scales.element_size() % torch_backend.SCALES_READ == 0
            calls.append(kernel)
            return kernel(inputs, codes, *others)

        return call

    for module, name in ((torch_backend, "_KERNEL"), (low_bit_kernels, "_INT4")):
        monkeypatch.setattr(module, name, checked(getattr(module, name)))
    with backend("torch"):  # 8 bits have a kernel of this package, which takes any address
        yield calls


@pytest.mark.parametrize(
    ("dtype", "is_compiled"),
    [*((dtype, False) for dtype in TOLERANCES), (torch.bfloat16, True)],
    ids=[*map(str, TOLERANCES), "compiled"],
)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("way", WAYS)
def test_what_kernels_are_handed(way, bits, dtype, is_compiled, handed_over, tmp_path):
    """Torch's kernels end the process at addresses that do not suit their vectors; weights and inputs come at any."""
    linear, rounded = (linear_of(in_features=96, out_features=size, dtype=dtype) for size in (37, 37))
    rounded = LowBitLinear.from_linear(rounded, bits=bits)
    rounded.weight_scales.fill_(7)
    rounded.pack()
    state = LowBitLinear.from_linear(linear, bits=bits).state_dict()
    expected_weight = LowBitLinear.from_linear(linear, bits=bits).dequantized()
    WAYS[way](rounded, {name: tensor.clone() for name, tensor in state.items()}, tmp_path)
    torch.compiler.reset()
    called = torch.compile(rounded, backend="aot_eager", fullgraph=True) if is_compiled else rounded
    for inputs in (apart(torch.randn(1, 96).to(dtype)), torch.randn(96, 3).to(dtype).T):
        with torch.no_grad():
            outputs = called(inputs).double()
        expected = inputs.double() @ expected_weight.T + linear.bias.double()
        torch.testing.assert_close(outputs, expected, rtol=0, atol=TOLERANCES[dtype] * 2)
    assert len(handed_over) == 2
    if not is_compiled:  # copied once, not in each call
        codes = rounded.weight_codes
        assert codes.data_ptr() % torch_backend.ALIGNMENT == 0
        assert rounded(inputs) is not None and rounded.weight_codes is codes
    for name, tensor in rounded.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_replaced_for_a_call(bits):
    """`functional_call` puts the saved form in the place of what the kernel reads."""
    one, other = (LowBitLinear.from_linear(linear_of(48 - 8 * place), bits=bits) for place in (0, 0))
    other.weight_scales.mul_(2)
    inputs = torch.randn(2, 128)
    expected = other(inputs)
    assert not torch.equal(one(inputs), expected)
    assert torch.equal(torch.func.functional_call(one, other.state_dict(), inputs), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_another_shape(bits):
    rounded = LowBitLinear.from_linear(linear_of(), bits=bits)
    rounded.pack()
    expected = rounded.weight_codes.clone()
    with pytest.raises(RuntimeError, match=rf"shape torch.Size\(\[{40 if bits == 8 else 48}, "):
        rounded.load_state_dict(LowBitLinear(64, 40, bits=bits).state_dict())
    assert torch.equal(rounded.weight_codes, expected)
    for name in ("weight_codes", "weight_scales"):
        wrong = copy.deepcopy(rounded)
        wrong.get_buffer(name).data = rounded.get_buffer(name)[:-1]
        with pytest.raises(ValueError, match="weight_codes and weight_scales must have shapes"):
            wrong(torch.ones(1, 128))


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_in_inference_mode(bits):
    rounded = LowBitLinear.from_linear(linear_of(), bits=bits)
    saved = copy.deepcopy(rounded.state_dict())
    rounded.weight_codes = apart(rounded.weight_codes)
    with torch.inference_mode():
        rounded(torch.ones(1, 128))
    rounded.load_state_dict(saved)


ON_A_PROCESSOR = """
import torch
from hf_hybrid_ssm.layers.low_bit_kernels import known_layout
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
