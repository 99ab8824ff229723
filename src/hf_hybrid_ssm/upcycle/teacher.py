"""A teacher, checked once: a decoder that transformers' attention interface reaches, with plain weights."""

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hf_hybrid_ssm.hub.one_line import few
from hf_hybrid_ssm.students.configuration import key_value_groups, teacher_attention
from hf_hybrid_ssm.students.outputs import logits_of
from hf_hybrid_ssm.students.teacher import AttentionLayer, attention_layers, class_of

WRAPPERS = {
    "_orig_mod.": "torch.compile wraps a module: give the model that was compiled",
    "base_layer.": "an adapter is attached: merge it first (merge_and_unload of peft), or load the model without it",
}
"""Parts of a tensor's name that say that another module lies around the teacher's own, and what to do then."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A pretrained decoder that can be upcycled; not changed by anything here.

    The names and shapes of its tensors must be those of a causal language model of its configuration, made anew.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer with its chat template; None: what needs words takes token ids.
        source: the folder, name on the Hub or GGUF file that it is from; None: it is at hand only.
        is_as_saved: its weights are those of `source`, in the type that they were saved in.

    Raises:
        TypeError: it is not a model.
        ValueError: it cannot be a teacher (`attention_layers`); it is compiled, has an adapter, is quantized or
            offloaded, is not the causal language model; its tensors are not those of its configuration or not of one
            plain floating-point type; or it is tied in the configuration alone. Says what to give instead.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase | None = None
    source: str | None = None
    is_as_saved: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module) or not hasattr(self.model, "config"):
            raise TypeError(f"model must be a causal language model of transformers, not {type(self.model).__name__}.")
        weights = self.model.state_dict()
        for part, reason in WRAPPERS.items():
            if wrapped := [name for name in weights if part in name]:
                raise ValueError(f"{wrapped[0]} of the teacher cannot be carried over: {reason}.")
        check_config(self.config)
        plain = class_of(self.config.model_type)
        if not isinstance(self.model, plain):
            raise ValueError(f"teacher={type(self.model).__name__} cannot be upcycled; only a {plain.__name__} can.")
        _check_names(weights, _shapes(plain, self.config), plain.__name__)
        _check_types(weights)
        _check_ties(self.model)

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def attention(self) -> dict[int, AttentionLayer]:
        """What is known of its attention layers, by number."""
        return attention_layers(self.config)

    @property
    def layers(self) -> list[int]:
        """Those whose attention sees all tokens: the others have windows of their own, or no attention."""
        return layers_of(self.config)

    @property
    def groups(self) -> int:
        """Key/value groups of each layer."""
        return key_value_groups(self.config)

    @property
    def decoder_layers(self) -> Any:
        """All of them, in order."""
        name = next(iter(self.attention.values())).name.rpartition(".")[0]
        return self.model.base_model.get_submodule(name.rpartition(".")[0])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Those of last hidden states (B, N, d) of its base model: (B, N, V)."""
        return logits_of(self.model, states)

    def attention_of(self, layer: int) -> Any:
        """The attention module of a layer."""
        return self.model.base_model.get_submodule(self.attention[layer].name)


def layers_of(config: PreTrainedConfig) -> list[int]:
    """As of `Teacher.layers`."""
    return [layer for layer, (kind, _) in enumerate(teacher_attention(config)) if kind == "full"]


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a model that cannot be a teacher, before its weights are read.

    Raises:
        ValueError: says why, and what to do instead.
    """
    attention_layers(config)
    value = getattr(config, "quantization_config", None)
    method = value.get("quant_method") if isinstance(value, dict) else getattr(value, "quant_method", None)
    if value is not None and method != "gguf":  # a GGUF file's weights are plain once they are loaded
        method = method if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"quantization_config ({method}) of the teacher cannot be carried over: call its dequantize() first."
        )


def _shapes(model_class: Any, config: Any) -> dict[str, torch.Size]:
    """The tensors of a model that is made anew, without their memory."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"  # the weights are the same, and nothing else has to be installed
    config.dtype = None  # a string once a model was saved, which some layers do not read
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
            "tie_word_embeddings=True of the teacher, but the weights of its embeddings and of its head differ: set "
            "teacher.config.tie_word_embeddings = False to carry both."
        )
