"""Weights of 8 and 4 bits through `from_pretrained`, over every family."""

import contextlib
import copy
import logging
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from hf_hybrid_ssm import (
    LmuIsaForSequenceClassification,
    LmuIsaModel,
    LonghornForCausalLM,
    LowBitConfig,
    use_float32_products,
)
from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear
from hf_hybrid_ssm.models import FAMILIES
from tests import processes
from tests.matrix.checks import EVERY_FAMILY, assert_near, check_generation, logits_of
from tests.tiny_models import COMBINATIONS, FEW, TOKENS, build, language_model, own_language_model

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


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (4, "float16"), (4, "bfloat16"), (8, "float32")])
def test_a_dtype_without_a_fast_kernel_is_said(bits, dtype, tmp_path, caplog):
    language_model("longhorn", wide=True).save_pretrained(tmp_path / "exact")
    config = LowBitConfig(bits=bits)
    with caplog.at_level(logging.WARNING, "hf_hybrid_ssm"):
        model = LonghornForCausalLM.from_pretrained(tmp_path / "exact", dtype=dtype, quantization_config=config)
        model.save_pretrained(tmp_path / "rounded")
        LonghornForCausalLM.from_pretrained(tmp_path / "rounded")
    said = [record.getMessage() for record in caplog.records if "made for bfloat16" in record.getMessage()]
    assert len(said) == (2 if bits == 4 and dtype != "bfloat16" else 0)
    assert all(f"as long in {dtype}: load the model with dtype='bfloat16'" in text for text in said)


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


@pytest.mark.parametrize("tensor", ["weight_codes", "weight_scales", "bias"])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_a_rounded_folder_lacks_is_not_made_up(bits, tensor, tmp_path):
    model = language_model("lmu-isa", wide=True)
    model.save_pretrained(tmp_path)
    load = type(model).from_pretrained
    load(tmp_path, quantization_config=LowBitConfig(bits=bits)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    missing = next(
        name for name in tensors if name.endswith(f".{tensor}") and name.replace(tensor, "weight_codes") in tensors
    )
    safetensors.torch.save_file({name: tensors[name] for name in tensors if name != missing}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"1 tensors of rounded maps are not in the folder.*: {missing}"):
        load(tmp_path)


def test_a_rounded_folder_has_no_other_head(tmp_path):
    model = language_model("lmu-isa", wide=True)
    model.save_pretrained(tmp_path)
    rounded = type(model).from_pretrained(tmp_path, quantization_config=LowBitConfig())
    rounded.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"2 tensors of rounded maps are not in the folder.*: score\.weight_codes"):
        LmuIsaForSequenceClassification.from_pretrained(tmp_path)
    base = LmuIsaModel.from_pretrained(tmp_path)
    assert rounded_maps(base) == {name.removeprefix("model.") for name in rounded_maps(rounded)} - {"lm_head"}


KEEPING = {
    "tie_weights": lambda model: model.tie_weights(),
    "init_weights": lambda model: model.init_weights(),
    "initialize_weights": lambda model: model.initialize_weights(),
    "set_input_embeddings": lambda model: model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings())),
    "resize_token_embeddings()": lambda model: model.resize_token_embeddings(),
    "resize_token_embeddings(same)": lambda model: model.resize_token_embeddings(model.config.vocab_size),
    "to": lambda model: model.to("cpu"),
    "deepcopy": lambda model: model.__dict__.update(copy.deepcopy(model).__dict__),
    "use_float32_products": lambda model: use_float32_products(model),
    "clear_kernel_caches": lambda model: model.clear_kernel_caches(),
}


def rounded_model(row, bits, folder):
    model = language_model(row, wide=True)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, quantization_config=LowBitConfig(bits=bits)).eval()


@pytest.mark.parametrize("row", EVERY_FAMILY)
def test_methods_that_change_models(row, tmp_path):
    """What replaces or initialises modules leaves rounded ones as they are; what cannot work says so, before."""
    model = rounded_model(row, 4, tmp_path)
    before, names = logits_of(model, row), rounded_maps(model)
    for name, change in KEEPING.items():
        change(model)
        assert rounded_maps(model) == names, name
        assert torch.equal(logits_of(model, row), before), name
    head = model.get_output_embeddings()
    if isinstance(head, LowBitLinear):
        for options in ((70,), (50,), (None, 8)):
            with pytest.raises(ValueError, match=r"rounded to 8 bits\. Resize .* after model\.dequantize\(\)"):
                model.resize_token_embeddings(*options)
        assert torch.equal(logits_of(model, row), before) and model.config.vocab_size == TOKENS["vocab_size"]
    for cast in (model.half, model.float, lambda: model.to(torch.float16)):
        with contextlib.suppress(ValueError):  # transformers' own refusal, in some versions
            cast()
            assert rounded_maps(model) == names and logits_of(model, row).isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("row", EVERY_FAMILY)
def test_dequantized_it_is_an_ordinary_model(row, bits, tmp_path):
    model = rounded_model(row, bits, tmp_path / "exact")
    before, expected = logits_of(model, row), dequantized(row, model)
    model = model.dequantize()
    assert not rounded_maps(model) and linear_maps(model) == linear_maps(expected)
    assert_near(logits_of(model, row), before, 1e-4, "logits")
    trains = {name: parameter.requires_grad for name, parameter in language_model(row, wide=True).named_parameters()}
    found = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert found == trains | dict.fromkeys(found.keys() - trains.keys(), True)
    model.resize_token_embeddings(70)
    assert_near(logits_of(model, row)[..., : TOKENS["vocab_size"]], before, 1e-4, "logits with more tokens")
    model.save_pretrained(tmp_path / "plain")
    again = type(model).from_pretrained(tmp_path / "plain").eval()
    assert not rounded_maps(again)
    assert torch.equal(logits_of(again, row), logits_of(model, row))


RELOADED = """
import sys
import torch
from transformers import logging
from hf_hybrid_ssm import LowBitConfig
from tests.tiny_models import EVERY, ROWS, batch_of, language_model
logging.set_verbosity_error()
logging.disable_progress_bar()
folder, family, dtype = sys.argv[1:]
for variant in ROWS:
    if EVERY[variant][0] != family:
        continue
    model = language_model(variant, wide=True)
    model.save_pretrained(f"{folder}/exact")
    for bits in (8, 4):
        load = type(model).from_pretrained
        rounded = load(f"{folder}/exact", dtype=dtype, quantization_config=LowBitConfig(bits=bits)).eval()
        rounded.save_pretrained(f"{folder}/rounded")
        print(variant, bits, flush=True)
        again = load(f"{folder}/rounded", dtype=dtype).eval()
        with torch.no_grad():
            for rows, length in ((1, 1), (2, 9), (3, 40)):  # for kernels of few rows, and of many
                found, expected = (one(**batch_of(variant, rows, length)).logits for one in (again, rounded))
                # where a vector of weights begins decides how torch's other products round
                difference = float((found - expected).abs().max() / expected.abs().max())
                assert difference <= (1e-5 if dtype == "float32" else 2e-2), (variant, bits, difference)
print("done")
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
def test_a_saved_folder_gives_the_same(family, dtype, tmp_path):
    """In a process of its own, which torch's kernels end where something does not suit them."""
    command = [sys.executable, "-c", RELOADED, tmp_path, family, dtype]
    told = processes.run(command, cwd=Path(__file__).parents[2], timeout=600)
    assert told.returncode == 0 and told.stdout.endswith("done\n"), (told.stdout, told.stderr[-2000:])


@pytest.mark.parametrize(
    ("variant", "class_name", "bits"),
    [(*of, 8) for of in COMBINATIONS] + [(*of, 4) for of in COMBINATIONS if of[0] in FEW],
)
def test_every_model_is_loaded_again(variant, class_name, bits, tmp_path):
    model = build(variant, class_name, wide=bits == 4)
    model.save_pretrained(tmp_path / "exact")
    load = type(model).from_pretrained
    rounded = load(tmp_path / "exact", quantization_config=LowBitConfig(bits=bits, head_bits=bits))
    rounded.save_pretrained(tmp_path / "rounded")
    again, info = load(tmp_path / "rounded", output_loading_info=True)
    assert not any(info.values()), info
    assert rounded_maps(again) == rounded_maps(rounded) != set()
    found, expected = ({**model.state_dict(), **dict(model.named_buffers())} for model in (again, rounded))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
