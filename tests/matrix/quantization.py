"""Quantization of weights, on a CPU: does a quantized model generate, and is what must stay exact left alone?"""

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel, QuantoConfig, TorchAoConfig

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornMixer
from tests.matrix.columns import Column, Group
from tests.matrix.rows import assert_near, check_generation, logits_of, model_of, saved

# of the largest logit of a random model
INT8, INT8_ACTIVATIONS, INT4 = 0.1, 0.2, 0.6


def _quantized(row: str, config: Any, tolerance: float) -> None:
    model = model_of(row, wide=True)
    with saved(model) as folder:
        quantized = type(model).from_pretrained(folder, quantization_config=config, device_map="cpu").eval()
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    converted = {name for name in linear if not _is_plain(quantized.get_submodule(name))}
    assert converted, "no layer was quantized"
    assert not [name for name in converted if "lm_head" in name], "the head was quantized"
    layers = {name for name in linear if name != "lm_head"}
    assert converted == layers, f"linear maps left as they were: {sorted(layers - converted)}"
    _check_recurrence_is_exact(model, quantized)
    assert_near(logits_of(quantized, row), logits_of(model, row), tolerance, "logits")
    check_generation(quantized, row)


def _is_plain(module: torch.nn.Module) -> bool:
    return type(module) is torch.nn.Linear and type(module.weight.data) is torch.Tensor


def _check_recurrence_is_exact(model: PreTrainedModel, quantized: PreTrainedModel) -> None:
    """Whatever belongs to a recurrence itself, and is no linear map, has the same bits."""
    for name, module in model.named_modules():
        if isinstance(module, (Mixer, LonghornMixer)):
            other = dict(quantized.get_submodule(name).named_parameters(recurse=False))
            for key, parameter in module.named_parameters(recurse=False):
                assert torch.equal(other[key], parameter), f"{name}.{key} changed"


def torchao_int8(row: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    _quantized(row, TorchAoConfig(Int8WeightOnlyConfig()), INT8)


def torchao_int8_activations(row: str) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    _quantized(row, TorchAoConfig(Int8DynamicActivationInt8WeightConfig()), INT8_ACTIVATIONS)


def quanto_int8(row: str) -> None:
    _quantized(row, QuantoConfig(weights="int8"), INT8)


def quanto_int4(row: str) -> None:
    _quantized(row, QuantoConfig(weights="int4"), INT4)


def bitsandbytes_int8(row: str) -> None:
    _quantized(row, BitsAndBytesConfig(load_in_8bit=True), INT8)


def bitsandbytes_nf4(row: str) -> None:
    _quantized(row, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), INT4)


def torch_dynamic_int8(row: str) -> None:
    """torch's own, which transformers does not know: the maps to convert are named one by one."""
    model = model_of(row, wide=True)
    layers = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    chosen = dict.fromkeys(layers, torch.ao.quantization.default_dynamic_qconfig)
    quantized = torch.ao.quantization.quantize_dynamic(model_of(row, wide=True), chosen, dtype=torch.qint8)
    assert not [name for name in layers if _is_plain(quantized.get_submodule(name))]
    _check_recurrence_is_exact(model, quantized)
    assert_near(logits_of(quantized, row), logits_of(model, row), INT8_ACTIVATIONS, "logits")
    check_generation(quantized, row)


GROUP = Group(
    "Quantization of weights",
    "Loaded from a folder with the method's `quantization_config` and no list of modules. Every linear map of the "
    "layers is quantized, the head is not, and what a recurrence is made of keeps every bit, as it is no linear map. "
    f"The logits stay within {INT8:.0%} (activations too: {INT8_ACTIVATIONS:.0%}; four bits: {INT4:.0%}) of the "
    "largest of a random model, and generation does not depend on the cache.",
    (
        Column("torchao int8", torchao_int8, "torchao"),
        Column("torchao int8, activations too", torchao_int8_activations, "torchao"),
        Column("quanto int8", quanto_int8, "optimum-quanto"),
        Column("quanto int4", quanto_int4, "optimum-quanto"),
        Column("bitsandbytes int8", bitsandbytes_int8, "bitsandbytes"),
        Column("bitsandbytes nf4", bitsandbytes_nf4, "bitsandbytes"),
        Column("torch dynamic int8", torch_dynamic_int8, "torch"),
    ),
)
