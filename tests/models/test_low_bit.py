"""Weights of 8 and 4 bits through `from_pretrained`, over every family."""

import logging

import pytest
import torch

from hf_hybrid_ssm import LowBitConfig
from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear
from tests.matrix.checks import EVERY_FAMILY, assert_near, check_generation, logits_of
from tests.tiny_models import language_model, own_language_model

TOLERANCES = {8: 0.1, 4: 0.6}  # of the largest logit of a random model


def rounded_maps(model):
    return {name for name, module in model.named_modules() if isinstance(module, LowBitLinear)}


def linear_maps(model):
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def dequantized(row, quantized):
    """The row's model with the weights that the codes stand for."""
    model = own_language_model(row, wide=True)
    model.config.tie_word_embeddings = quantized.config.tie_word_embeddings
    for name in rounded_maps(quantized):
        weight = quantized.get_submodule(name).dequantized().float()
        model.get_submodule(name).weight = torch.nn.Parameter(weight)
    return model


@pytest.mark.parametrize("bits", TOLERANCES)
@pytest.mark.parametrize("row", EVERY_FAMILY)
def test_every_family(row, bits, tmp_path, caplog):
    model = language_model(row, wide=True)
    model.save_pretrained(tmp_path / "exact")
    config = LowBitConfig(bits=bits)
    with caplog.at_level(logging.WARNING, "hf_hybrid_ssm"):
        quantized = type(model).from_pretrained(tmp_path / "exact", quantization_config=config).eval()
    is_shared = model.config.is_encoder_decoder and model.config.tie_word_embeddings
    left = linear_maps(quantized) - ({"lm_head"} if is_shared else set())
    assert all(bits == 4 and model.get_submodule(name).in_features % 32 for name in left), left
    assert all(name in caplog.text for name in left)
    assert rounded_maps(quantized) | linear_maps(quantized) == linear_maps(model)
    assert is_shared or quantized.lm_head.bits == 8
    assert {quantized.get_submodule(name).bits for name in rounded_maps(quantized) - {"lm_head"}} == {bits}
    assert_near(logits_of(quantized, row), logits_of(dequantized(row, quantized), row), 1e-4, "the same weights")
    assert_near(logits_of(quantized, row), logits_of(model, row), TOLERANCES[bits], "logits")
    check_generation(quantized, row)
    quantized.save_pretrained(tmp_path / "rounded")
    again = type(model).from_pretrained(tmp_path / "rounded").eval()
    assert rounded_maps(again) == rounded_maps(quantized)
    assert torch.equal(logits_of(again, row), logits_of(quantized, row))


def test_tied_head(tmp_path):
    """It has codes of its own; the embeddings keep their precision."""
    model = own_language_model("longhorn", wide=True)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "exact")
    load = type(model).from_pretrained
    quantized = load(tmp_path / "exact", quantization_config=LowBitConfig(bits=8)).eval()
    assert "lm_head" in rounded_maps(quantized)
    assert torch.equal(quantized.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert_near(logits_of(quantized, "longhorn"), logits_of(model, "longhorn"), 0.1, "logits")
    quantized.save_pretrained(tmp_path / "rounded")
    again = load(tmp_path / "rounded").eval()
    assert torch.equal(logits_of(again, "longhorn"), logits_of(quantized, "longhorn"))


@pytest.mark.parametrize("bits, head_bits", [(8, 4), (4, 4)])
def test_bits_of_the_head(bits, head_bits, tmp_path):
    model = language_model("longhorn", wide=True)
    model.save_pretrained(tmp_path / "exact")
    load = type(model).from_pretrained
    quantized = load(tmp_path / "exact", quantization_config=LowBitConfig(bits=bits, head_bits=head_bits)).eval()
    assert quantized.lm_head.bits == head_bits
    quantized.save_pretrained(tmp_path / "rounded")
    again = load(tmp_path / "rounded").eval()
    assert again.lm_head.bits == head_bits
    assert torch.equal(logits_of(again, "longhorn"), logits_of(quantized, "longhorn"))


def test_maps_that_keep_their_precision(tmp_path):
    model = language_model("longhorn", wide=True)
    model.save_pretrained(tmp_path)
    config = LowBitConfig(bits=8, modules_to_not_convert=["lm_head", "dt_proj"])
    quantized = type(model).from_pretrained(tmp_path, quantization_config=config)
    expected = {name for name in linear_maps(model) if name.rsplit(".", 1)[-1] in ("lm_head", "dt_proj")}
    assert len(expected) > 1 and linear_maps(quantized) == expected


def test_refused(tmp_path):
    with pytest.raises(ValueError, match="bits must be 8 or 4, got 3"):
        LowBitConfig(bits=3)
    with pytest.raises(ValueError, match="head_bits must be 8 or 4, got 16"):
        LowBitConfig(head_bits=16)
    with pytest.raises(TypeError, match="modules_to_not_convert must be a list of names, got 'lm_head'"):
        LowBitConfig(modules_to_not_convert="lm_head")
    model = language_model("longhorn")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LowBitConfig is for CPUs; device_map asks for cuda"):
        type(model).from_pretrained(tmp_path, quantization_config=LowBitConfig(), device_map={"": "cuda"})
