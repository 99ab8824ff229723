"""Quantization of weights

Loaded from a folder with the method's `quantization_config` and no list of modules. Every linear map of the layers is
quantized, the head is not, and what a recurrence is made of keeps every bit, as it is not a linear map. The logits
stay within 10% (activations too: 20%; four bits: 60%) of the largest of a random model, and generation does not depend
on the cache. (With bitsandbytes' `llm_int8_threshold` of 6, its default, it may: a column with an input above it is
computed in more bits for all tokens of a forward, and a cache makes that one token.)
"""

import pytest
import torch
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer
from tests.matrix.checks import EVERY_FAMILY, assert_near, cells, check_generation, logits_of, rows
from tests.tiny_models import ROWS, language_model, own_language_model

INT8, INT8_ACTIVATIONS, INT4 = 0.1, 0.2, 0.6
# column → the library's module, its configuration, the tolerance
METHODS = {
    "torchao int8": ("torchao.quantization", lambda ao: TorchAoConfig(ao.Int8WeightOnlyConfig()), INT8),
    "torchao int8 activations": (
        "torchao.quantization",
        lambda ao: TorchAoConfig(ao.Int8DynamicActivationInt8WeightConfig()),
        INT8_ACTIVATIONS,
    ),
    "quanto int8": ("optimum.quanto", lambda _: QuantoConfig(weights="int8"), INT8),
    "quanto int4": ("optimum.quanto", lambda _: QuantoConfig(weights="int4"), INT4),
    "bitsandbytes int8": (
        "bitsandbytes",
        lambda _: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
        INT8,
    ),
    "bitsandbytes nf4": (
        "bitsandbytes",
        lambda _: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        INT4,
    ),
}
# where the library is there; `make test` installs torch's own only
QUICK = {"torchao int8": ["longhorn"], "quanto int8": ["bst sh s4d"], "bitsandbytes int8": ["spade s4 window"]}
NF4 = pytest.mark.limit(
    "bitsandbytes",
    r"shape '\[\d+, 0\]' is invalid|N must be divisible by block_n",
    "its four-bit kernel for CPUs wants inputs of at least 64 features and a multiple of 32 outputs; Longhorn's "
    "`dt_proj` has a sixteenth of the hidden size as inputs, and keys of few small heads are as narrow. "
    '`llm_int8_skip_modules=["lm_head", "dt_proj"]`, with the narrow maps of a model added, leaves them alone.',
)


@cells({column: QUICK.get(column, ()) for column in METHODS}, nf4=NF4)
def test_quantized(column, row, tmp_path):
    library, configure, tolerance = METHODS[column]
    config = configure(pytest.importorskip(library))
    model = language_model(row, wide=True)
    model.save_pretrained(tmp_path)
    quantized = type(model).from_pretrained(tmp_path, quantization_config=config, device_map="cpu").eval()
    linear = _linear(model)
    converted = {name for name in linear if not _is_plain(quantized.get_submodule(name))}
    assert not [name for name in converted if "lm_head" in name], "the head was quantized"
    layers = linear - {"lm_head"}
    assert converted == layers, f"linear maps left as they were: {sorted(layers - converted)}"
    _check(row, model, quantized, tolerance)


def _check(row, model, quantized, tolerance):
    for name, module in model.named_modules():
        if isinstance(module, (Mixer, LonghornMixer)):
            other = dict(quantized.get_submodule(name).named_parameters(recurse=False))
            for key, parameter in module.named_parameters(recurse=False):
                assert torch.equal(other[key], parameter), f"{name}.{key} changed"
    assert_near(logits_of(quantized, row), logits_of(model, row), tolerance, "logits")
    check_generation(quantized, row)


def _linear(model):
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def _is_plain(module):
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


@pytest.mark.limit(
    "torch",
    "the cache changes the generated tokens",
    "it rounds activations by the largest value of the whole tensor, so that a token's result depends on what is "
    "computed along with it, whatever the model.",
)
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@rows(*EVERY_FAMILY)
def test_torch_dynamic_int8(row):
    """torch's own, which transformers does not know: the maps to convert are named one by one."""
    model = language_model(row, wide=True)
    layers = _linear(model) - {"lm_head"}
    chosen = dict.fromkeys(layers, torch.ao.quantization.default_dynamic_qconfig)
    quantized = torch.ao.quantization.quantize_dynamic(own_language_model(row, wide=True), chosen, dtype=torch.qint8)
    assert not [name for name in layers if _is_plain(quantized.get_submodule(name))]
    _check(row, model, quantized, INT8_ACTIVATIONS)


@rows(*ROWS)
def test_linear_maps_see_three_dimensions(row):
    """The 8-bit ones of bitsandbytes fail on more."""
    model, seen = own_language_model(row), []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dim()))
    check_generation(model, row)
    assert seen and max(seen) <= 3
