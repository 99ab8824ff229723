"""Linear maps in half precision whose products with many rows are in float32."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from hf_hybrid_ssm import use_float32_products
from hf_hybrid_ssm.layers import low_bit_linear
from hf_hybrid_ssm.layers.float32_linear import HALF, MANY_ROWS, Float32Linear, has_fast_products
from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear
from tests.matrix.checks import EVERY_FAMILY, check_generation, logits_of
from tests.tiny_models import own_language_model

MOST_ROUNDINGS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # one rounding, of a value's own size


def both(dtype, bias=True):
    torch.manual_seed(0)
    plain = torch.nn.Linear(70, 40, bias=bias).to(dtype)
    changed = copy.deepcopy(plain)
    assert use_float32_products(changed, always=True) == 1
    return plain, changed


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(MANY_ROWS,), (3, 5), (2, 1, 70)], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounded_once(dtype, shape, bias):
    """Against the product in float64: no more than one rounding of the output, and float32's own."""
    _, changed = both(dtype, bias)
    inputs = torch.randn(*shape, 70).to(dtype)
    with torch.no_grad():
        outputs = changed(inputs)
    exact = inputs.double() @ changed.weight.double().T + (changed.bias.double() if bias else 0)
    assert outputs.dtype == dtype and outputs.shape == exact.shape
    torch.testing.assert_close(outputs.double(), exact.detach(), rtol=MOST_ROUNDINGS[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_stays(dtype):
    """Few rows, no row, training, autocast and float32 inputs are those of `nn.Linear`, bit by bit."""
    plain, changed = both(dtype)
    for rows in (0, 1, MANY_ROWS - 1):
        inputs = torch.randn(rows, 70).to(dtype)
        with torch.no_grad():
            assert torch.equal(changed(inputs), plain(inputs))
    inputs = torch.randn(64, 70).to(dtype)
    for each in (plain, changed):
        each(inputs).float().square().sum().backward()
    assert torch.equal(changed.weight.grad, plain.weight.grad) and torch.equal(changed(inputs), plain(inputs))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(changed(inputs), plain(inputs))
    with torch.no_grad(), pytest.raises(RuntimeError, match="dtype"):
        changed(inputs.float())
    assert list(changed.state_dict()) == list(plain.state_dict())


def test_no_inputs():
    """`y = b`, as with `nn.Linear`."""
    changed = torch.nn.Linear(0, 3).bfloat16()
    assert use_float32_products(changed, always=True) == 1
    with torch.no_grad():
        assert torch.equal(changed(torch.ones(9, 0).bfloat16()), changed.bias.expand(9, 3))


def test_compiled():
    _, changed = both(torch.bfloat16)
    compiled = torch.compile(changed, backend="aot_eager")
    for rows in (1, MANY_ROWS, 64):
        inputs = torch.randn(rows, 70).bfloat16()
        with torch.no_grad():
            torch.testing.assert_close(compiled(inputs), changed(inputs))


@pytest.mark.parametrize("row", EVERY_FAMILY)
def test_every_family(row, tmp_path):
    """All linear maps are changed, logits come no farther from float32's, and what is saved is the same."""
    model = own_language_model(row, wide=True).bfloat16().eval()
    exact = logits_of(copy.deepcopy(model).float(), row)
    errors = [(logits_of(model, row).float() - exact).norm()]
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert plain
    assert use_float32_products(model, always=True) == len(plain)
    assert all(isinstance(model.get_submodule(name), Float32Linear) for name in plain)
    assert use_float32_products(model, always=True) == 0, "a second time changes nothing"
    errors.append((logits_of(model, row).float() - exact).norm())
    assert errors[1] <= errors[0] * 1.1, errors
    check_generation(model, row)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not any(isinstance(module, Float32Linear) for module in again.modules())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_weights_are_left(dtype):
    assert use_float32_products(own_language_model("longhorn").to(dtype), always=True) == 0


def test_no_model():
    with pytest.raises(TypeError, match="model must be a model of transformers, got str"):
        use_float32_products("checkpoints/longhorn-books")


def test_low_bits_follow(monkeypatch):
    """With 8 bits many rows are multiplied in float32 where half precision is slow; nobody has to ask."""
    torch.manual_seed(0)
    rounded = LowBitLinear.from_linear(torch.nn.Linear(70, 40).bfloat16(), bits=8)
    inputs = torch.randn(64, 70).bfloat16()
    exact = inputs.double() @ rounded.dequantized().T + rounded.bias.double()
    monkeypatch.setattr(low_bit_linear, "has_fast_products", lambda dtype: False)
    products = []
    kept = rounded._product
    monkeypatch.setattr(rounded, "_product", lambda flat: products.append(flat.dtype) or kept(flat))
    torch.testing.assert_close(rounded(inputs).double(), exact, rtol=0.02, atol=0.02)
    assert products == [torch.float32]


def test_chosen_by_processor():
    """Where torch is kept to AVX2 the maps are changed, without being asked twice; here as the processor is."""
    code = (
        "import torch; from hf_hybrid_ssm import use_float32_products as use; "
        "print(use(torch.nn.Linear(8, 8).bfloat16()), use(torch.nn.Linear(8, 8).half()), use(torch.nn.Linear(8, 8)))"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1", "1", "0"]
    for dtype in HALF:
        assert use_float32_products(torch.nn.Linear(8, 8).to(dtype)) == (not has_fast_products(dtype))
