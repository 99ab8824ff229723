"""Whether a teacher holds what its configuration says: every tensor of its architecture, plain, and no other."""

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hybrid_ssm.hub.one_line import few
from hf_hybrid_ssm.upcycle.teachers import check_teacher

WRAPPERS = {
    "_orig_mod.": "torch.compile wraps a module: give the model that was compiled",
    "base_layer.": "an adapter is attached: merge it first (merge_and_unload of peft), or load the model without it",
}
"""Parts of a tensor's name that say that another module lies around the teacher's own, and what to do then."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_weights(teacher: Any) -> None:
    """Refuse a model whose weights a student would not get, or would get wrong.

    The names and shapes of its tensors must be those of a causal language model of its configuration, made anew.

    Raises:
        TypeError: it is not a model.
        ValueError: its configuration cannot be upcycled (`check_teacher`); it is compiled, has an adapter, is
            quantized or offloaded, is not the causal language model; its tensors are not those of its configuration
            or not of one plain floating-point type; or it is tied in the configuration alone. Says what to give
            instead.
    """
    if not isinstance(teacher, nn.Module) or not hasattr(teacher, "config"):
        raise TypeError(f"teacher must be a causal language model of transformers, not {type(teacher).__name__}.")
    weights = teacher.state_dict()
    for part, reason in WRAPPERS.items():
        if wrapped := [name for name in weights if part in name]:
            raise ValueError(f"{wrapped[0]} of the teacher cannot be carried over: {reason}.")
    config: Any = teacher.config
    check_teacher(config)
    plain = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
    if not isinstance(teacher, plain):
        raise ValueError(f"teacher={type(teacher).__name__} cannot be upcycled; only a {plain.__name__} can.")
    _check_names(weights, _shapes(plain, config), plain.__name__)
    _check_types(weights)
    _check_ties(teacher)


def _shapes(model_class: Any, config: Any) -> dict[str, torch.Size]:
    """The tensors of a model that is made anew, without their memory."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # the weights are the same, and nothing else has to be installed
    with torch.device("meta"):
        return {name: value.shape for name, value in model_class(config).state_dict().items()}


def _check_names(weights: dict[str, Any], wanted: dict[str, torch.Size], model: str) -> None:
    if extra := [name for name in weights if name not in wanted]:
        raise ValueError(f"the teacher holds {few(extra)}, which no plain {model} has.")
    if missing := [name for name in wanted if name not in weights]:
        raise ValueError(f"the teacher lacks {few(missing)}, which a {model} of its configuration has.")
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            raise ValueError(
                f"{name} of the teacher is {tuple(weights[name].shape)}, not {tuple(shape)} as configured."
            )


def _check_types(weights: dict[str, torch.Tensor]) -> None:
    for name, value in weights.items():
        if value.dtype not in DTYPES or type(value) not in (torch.Tensor, nn.Parameter):
            raise ValueError(
                f"{name} of the teacher is {value.dtype} ({type(value).__name__}), not plain floating point: load the "
                "teacher without quantization, in one process."
            )
        if value.is_meta:
            raise ValueError(f"{name} of the teacher is offloaded (on the meta device): load the teacher whole.")
    if len(types := {value.dtype for value in weights.values()}) > 1:
        names = ", ".join(sorted(map(str, types)))
        raise ValueError(f"the teacher's weights are {names}; a student has one type: call teacher.to(dtype) first.")


def _check_ties(teacher: Any) -> None:
    inputs, outputs = teacher.get_input_embeddings().weight, teacher.get_output_embeddings().weight
    if teacher.config.tie_word_embeddings and inputs is not outputs and not torch.equal(inputs, outputs.to(inputs)):
        raise ValueError(
            "tie_word_embeddings=True of the teacher, but lm_head.weight is not model.embed_tokens.weight: set "
            "teacher.config.tie_word_embeddings = False to carry both."
        )
