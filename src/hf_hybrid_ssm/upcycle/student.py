"""From a teacher to its student: the configuration, the weights that carry over, and the list of those that do not."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornForCausalLM
from hf_hybrid_ssm.upcycle.projections import init_from_attention
from hf_hybrid_ssm.upcycle.teachers import attention_types, check_teacher, has_attention_bias, head_dim_of

SHARED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "initializer_range", "tie_word_embeddings", "attention_dropout",
    "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
NORMS = {"input_layernorm": "norm", "post_attention_layernorm": "mlp_norm"}
INITS = ("projections", "random")
TRANSLATED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "v_proj.bias", "o_proj.weight", "o_proj.bias")


@dataclass
class Carried:
    """What became of the teacher's weights, by parameter name.

    Attributes:
        copied: in the student, the same values.
        translated: of attention that was replaced; the new mixer starts from them.
        dropped: of attention that was replaced; nothing of them is left.
        new: of the student, from no weight of the teacher.
    """

    copied: list[str] = field(default_factory=list)
    translated: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.copied)} tensors are copied."]
        for name in ("translated", "dropped", "new"):
            if found := getattr(self, name):
                lines.append(f"{name}: {', '.join(found)}")
        return "\n".join(lines)


def evenly_spaced(layers: int, count: int) -> list[int]:
    """`count` of `layers` layers, each in the middle of its share: the states of earlier layers feed them."""
    return [(2 * index + 1) * layers // (2 * count) for index in range(count)]


def student_config(
    teacher: PreTrainedConfig, keep: float | Sequence[int] = 0.25, keep_as: str | None = None, **fields: Any
) -> LonghornConfig:
    """The configuration of a Longhorn hybrid with the teacher's sizes.

    Args:
        teacher: of a Llama, Mistral, Qwen2 or Qwen3.
        keep: the layers that keep their attention: their indices, or the share of all layers, evenly spaced.
        keep_as: "full_attention" or "sliding_attention" for the layers that keep it; None: as in the teacher.
        fields: of `LonghornConfig`, such as `state_size` (32 by default) and `sliding_window`.

    Raises:
        ValueError: the teacher cannot be upcycled, or there is no such layer.
    """
    check_teacher(teacher)
    layers = teacher.num_hidden_layers
    if isinstance(keep, int | float):
        if not 0 <= keep <= 1:
            raise ValueError(f"keep={keep} must be a share between 0 and 1, or a list of layers.")
        keep = evenly_spaced(layers, round(keep * layers))
    if unknown := sorted(set(keep) - set(range(layers))):
        raise ValueError(f"keep={list(keep)} names {unknown}, but the teacher's layers are 0 to {layers - 1}.")
    if keep_as not in (None, "full_attention", "sliding_attention"):
        raise ValueError(f'keep_as={keep_as!r} must be "full_attention", "sliding_attention" or None.')
    types = [
        (keep_as or kind) if index in keep else "linear_attention"
        for index, kind in enumerate(attention_types(teacher))
    ]
    window = getattr(teacher, "sliding_window", None)
    known = {name: getattr(teacher, name) for name in SHARED_FIELDS if hasattr(teacher, name)}
    known |= {
        "block_types": types,
        "head_dim": head_dim_of(teacher),
        "mlp_intermediate_size": teacher.intermediate_size,
        "layer_norm_epsilon": teacher.rms_norm_eps,
        "rope_parameters": teacher.rope_parameters,
        "attention_bias": has_attention_bias(teacher),
        "use_qk_norm": teacher.model_type == "qwen3",
        "use_bias": True,  # a constant gate has no other place
        "residual_in_fp32": False,
        "state_size": 32,
    } | ({} if window is None else {"sliding_window": window})
    return LonghornConfig(**(known | fields))


@torch.no_grad()
def upcycle(
    teacher: PreTrainedModel,
    keep: float | Sequence[int] = 0.25,
    keep_as: str | None = None,
    init: str = "projections",
    **fields: Any,
) -> tuple[LonghornForCausalLM, Carried]:
    """A Longhorn hybrid that starts from a trained transformer.

    Embeddings, norms, feed-forward layers, head and kept attention layers are copied; a mixer takes the place of every
    other attention.

    Args:
        teacher: a causal language model of transformers; not changed.
        keep, keep_as, fields: as of `student_config`.
        init: new mixers start from the "projections" of the attention they replace (see `init_from_attention`), or
            "random".

    Returns:
        The student, in the teacher's dtype and on its device, and what became of each weight.

    Raises:
        ValueError: as of `student_config`, or `init` is unknown.
    """
    if init not in INITS:
        raise ValueError(f"init={init!r} must be one of {', '.join(map(repr, INITS))}.")
    config = student_config(teacher.config, keep, keep_as, **fields)
    student = LonghornForCausalLM(config).to(device=teacher.device, dtype=teacher.dtype)
    report = Carried()
    weights, wanted = teacher.state_dict(), student.state_dict()
    filled = set()
    for name, value in weights.items():
        target = _name_in_student(name)
        if target in wanted:
            wanted[target].copy_(value)
            filled.add(target)
            report.copied.append(name)
        elif init == "projections" and name.endswith(TRANSLATED):
            report.translated.append(name)
        else:
            report.dropped.append(name)
    for name in sorted(wanted.keys() - filled):
        if name.endswith("o_proj.bias"):  # Qwen2 has none
            wanted[name].zero_()
        report.new.append(name)
    if init == "projections":
        for old, new in zip(teacher.model.layers, student.model.layers):
            if new.is_recurrent:
                init_from_attention(new.mixer, old.self_attn)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student, report


def _name_in_student(name: str) -> str:
    for theirs, ours in NORMS.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name
