"""How precisely linear maps compute on a CPU: weights of 8 or 4 bits, as one more `quantization_config` of
transformers, and prefill matmuls in float32."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_hybrid_ssm.layers.float32_linear import HALF, Float32Linear, has_fast_products
from hf_hybrid_ssm.layers.low_bit_grid import DTYPES, check_grid, fits

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # whose module imports the quantizers, and these this one

    from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear

logger = logging.getLogger(__name__)
METHOD = "hf_hybrid_ssm_low_bit"


class LowBitConfig(QuantizationConfigMixin):
    """Linear maps in 8 or 4 bits and the language-model head in 8, for inference on a CPU.

    `AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", quantization_config=LowBitConfig(bits=4))`;
    `save_pretrained` writes the rounded weights, and such a folder loads without the argument. `model.dequantize()`
    gives plain linear maps back, with the rounded weights.

    Args:
        bits: 8 (one scale a row) or 4 (a scale and a zero a group of columns).
        head_bits: the same of the language-model head, whose rounding moves every logit.
        group_size: columns of a group, with 4 bits: 32, 64, 128 or 256. Maps whose inputs it does not divide keep
            their precision; a warning names them.
        modules_to_not_convert: names of further maps that keep their precision, or the last parts of names.

    Raises:
        ValueError: bits or a group size that there is not.
    """

    def __init__(
        self,
        bits: int = 8,
        head_bits: int = 8,
        group_size: int = 32,
        modules_to_not_convert: list[str] | None = None,
        quant_method: str = METHOD,
    ):
        check_grid(bits, group_size)
        check_grid(head_bits, group_size, "head_bits")
        if isinstance(modules_to_not_convert, str):
            raise TypeError(f"modules_to_not_convert must be a list of names, got {modules_to_not_convert!r}.")
        self.quant_method = quant_method
        self.bits, self.head_bits, self.group_size = bits, head_bits, group_size
        self.modules_to_not_convert = modules_to_not_convert


class LowBitQuantizer(HfQuantizer):
    """Puts a `LowBitLinear` in the place of every linear map: before loading a rounded folder, after any other."""

    quantization_config: LowBitConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        placed = kwargs.get("device_map")
        devices = placed.values() if isinstance(placed, dict) else [] if placed in (None, "auto") else [placed]
        if other := [device for device in devices if str(device) != "cpu"]:
            raise ValueError(f"LowBitConfig is for CPUs; device_map asks for {other[0]}.")

    def _chosen(self, model: PreTrainedModel) -> dict[str, tuple[nn.Linear, int]]:
        """Name → the map and its bits."""
        config = self.quantization_config
        skipped = tuple(config.modules_to_not_convert or ())
        linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        chosen = {
            name: module
            for name, module in linear.items()
            if not any(name == skip or name.endswith(f".{skip}") for skip in skipped)
        }
        # the shared embeddings of an encoder and a decoder are one tensor with the head, and stay one
        head = model.get_output_embeddings()
        if model.config.is_encoder_decoder and model.config.tie_word_embeddings:
            chosen = {name: module for name, module in chosen.items() if module is not head}
        with_bits = {
            name: (module, config.head_bits if module is head else config.bits) for name, module in chosen.items()
        }
        unfit = [
            name for name, (module, bits) in with_bits.items() if not fits(module.in_features, bits, config.group_size)
        ]
        if unfit:
            logger.warning(
                "%d linear maps keep their precision, as group_size=%d does not divide their inputs: %s",
                len(unfit),
                config.group_size,
                ", ".join(unfit),
            )
        return {name: found for name, found in with_bits.items() if name not in unfit}

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear  # with its op, which few models need

        if not self.pre_quantized:
            return
        config = self.quantization_config
        for name, (linear, bits) in self._chosen(model).items():
            empty = LowBitLinear(
                linear.in_features,
                linear.out_features,
                bits=bits,
                group_size=config.group_size,
                bias=linear.bias is not None,
                device=linear.weight.device,
                dtype=linear.weight.dtype,
            )
            model.set_submodule(name, empty)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear

        config = self.quantization_config
        if not self.pre_quantized:
            for name, (linear, bits) in self._chosen(model).items():
                if linear.weight.dtype not in DTYPES:
                    raise TypeError(f"{name}.weight must be float32, bfloat16 or float16, got {linear.weight.dtype}.")
                rounded = LowBitLinear.from_linear(linear, bits=bits, group_size=config.group_size)
                model.set_submodule(name, rounded)
        else:
            _check_whole(model)
        if isinstance(model.get_output_embeddings(), LowBitLinear) and model.config.tie_word_embeddings:
            model.config.tie_word_embeddings = False  # the head has codes of its own, the embeddings keep theirs
            model.all_tied_weights_keys = {}
        dtypes = {module.weight_scales.dtype for module in _rounded(model).values() if module.bits == 4}
        if slow := dtypes - {torch.bfloat16}:
            logger.warning(
                "torch's kernel for weights of 4 bits is made for bfloat16, and takes tens of times as long in %s: "
                "load the model with dtype='bfloat16'.",
                " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in slow)),
            )
        for module in _rounded(model).values():
            module.pack()
        model.requires_grad_(False)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """`model.dequantize()`: linear maps again, with the rounded weights, and what trained before trains again."""
        for name, module in _rounded(model).items():
            model.set_submodule(name, module.to_linear(dtype or model.dtype))
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module.register_parameter(name, parameter.requires_grad_())  # where it is frozen it is so again
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _rounded(model: PreTrainedModel) -> dict[str, LowBitLinear]:
    from hf_hybrid_ssm.layers.low_bit_linear import LowBitLinear

    return {name: module for name, module in model.named_modules() if isinstance(module, LowBitLinear)}


def _check_whole(model: PreTrainedModel) -> None:
    """Refuse rounded maps of which the folder lacks a tensor: nothing trains them, so nothing may be made up."""
    tensors = {
        f"{name}.{key}": tensor
        for name, module in _rounded(model).items()
        for key, tensor in module.state_dict(keep_vars=True).items()
    }
    missing = [name for name, tensor in tensors.items() if not getattr(tensor, "_is_hf_initialized", False)]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of rounded maps are not in the folder, or have another shape there: "
            f"{', '.join(missing[:5])}{', ...' if missing[5:] else ''}. Load it as the class that was saved, or round "
            "the model again."
        )


def use_float32_products(model: PreTrainedModel, *, always: bool = False) -> int:
    """Run prefill matmuls in float32 on CPUs without bfloat16 or float16 instructions.

    Any model of transformers, ours or a teacher. Weights stay as they are, one map at a time is converted while it is
    used; a token alone, training, what is saved and other devices do not change. Logits differ by rounding.

    Args:
        model: changed in place: its plain `nn.Linear` become `Float32Linear`.
        always: also where the processor has instructions for the dtype of the weights, which are faster.

    Returns:
        How many maps were changed; 0 in float32, and on a processor with instructions of its own.

    Raises:
        TypeError: something that is no model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}.")
    # subclasses are somebody else's maps; adapters keep the plain one inside
    plain = [module for module in model.modules() if type(module) is nn.Linear and module.weight.dtype in HALF]
    chosen = [module for module in plain if always or not has_fast_products(module.weight.dtype)]
    for module in chosen:
        module.__class__ = Float32Linear
    return len(chosen)


if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(LowBitConfig)
    register_quantizer(METHOD)(LowBitQuantizer)
