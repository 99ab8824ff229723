"""Run prefill matmuls of models in half precision in float32 on CPUs without bfloat16 or float16 instructions."""

from torch import nn
from transformers import PreTrainedModel

from hf_hybrid_ssm.layers.float32_linear import HALF, Float32Linear, has_fast_products


def use_float32_products(model: PreTrainedModel, *, always: bool = False) -> int:
    """Have the linear maps of a model in half precision multiply prompts in float32, where the processor cannot.

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
