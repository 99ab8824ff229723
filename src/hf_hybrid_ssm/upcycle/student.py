"""From a teacher to its student: the weights that carry over, and the list of those that do not."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_hybrid_ssm.models.bst.attention import ContextAttention, StateAttention
from hf_hybrid_ssm.models.bst.modeling_bst import BstForCausalLM
from hf_hybrid_ssm.models.longhorn.modeling_longhorn import LonghornBlock, LonghornForCausalLM, LonghornHybridBlock
from hf_hybrid_ssm.upcycle.choice import WINDOW, LayerChoice, choose_layers
from hf_hybrid_ssm.upcycle.configurations import student_config
from hf_hybrid_ssm.upcycle.context_states import init_context
from hf_hybrid_ssm.upcycle.mixer_heads import close_output, init_from_heads
from hf_hybrid_ssm.upcycle.projections import init_from_attention
from hf_hybrid_ssm.upcycle.sinks import init_sinks
from hf_hybrid_ssm.upcycle.teacher_weights import check_weights

Student = LonghornForCausalLM | BstForCausalLM
STUDENTS: dict[str, type[Student]] = {"longhorn": LonghornForCausalLM, "bst": BstForCausalLM}
NAMES = {
    "longhorn": {".input_layernorm.": ".norm.", ".post_attention_layernorm.": ".mlp_norm."},
    "bst": {
        ".input_layernorm.": ".attention_norm.",
        ".post_attention_layernorm.": ".feed_forward_norm.",
        ".self_attn.": ".attention.",
        ".mlp.": ".feed_forward.",
    },
}
INITS = ("projections", "random")
TRANSLATED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "v_proj.bias", "o_proj.weight", "o_proj.bias")


@dataclass
class UpcycleReport:
    """What became of the teacher's weights, by parameter name.

    Attributes:
        copied: in the student, the same values.
        translated: of attention that was replaced; the new mixer starts from them.
        dropped: of attention that was replaced; nothing of them is left.
        new: of the student, with no counterpart in the teacher.
        choice: which layers were kept, and why; None where no layers are kept as they are.
    """

    copied: list[str] = field(default_factory=list)
    translated: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    choice: LayerChoice | None = None

    def __str__(self) -> str:
        lines = [] if self.choice is None else [str(self.choice)]
        lines.append(f"{len(self.copied)} tensors are copied.")
        for name in ("translated", "dropped", "new"):
            if names := getattr(self, name):
                lines.append(f"{name}: {', '.join(names)}")
        return "\n".join(lines)


@torch.no_grad()
def upcycle(
    teacher: PreTrainedModel,
    keep: float | Sequence[Any] | None = None,
    keep_as: str | None = None,
    init: str = "projections",
    family: str = "longhorn",
    others_as: str | None = None,
    keep_by: str | None = None,
    tokenizer: Any | None = None,
    **fields: Any,
) -> tuple[Student, UpcycleReport]:
    """A hybrid that starts from a trained transformer.

    Embeddings, norms, feed-forward layers and head are copied. In a Longhorn hybrid the attention layers to `keep` are
    copied too. A mixer takes the place of every other attention, or with `others_as` that is copied as well and sees a
    window; a mixer beside it ("hybrid_sliding") has an output projection of zero. In a Block-State Transformer all
    attention is copied and sees `sliding_window` tokens before its own; the layers in `ssm_layers` also attend to
    context states, whose half of the output projection is zero. Windows have a constant sink (`init_sinks`) where the
    teacher saw all tokens. Until it is trained, a student in which no mixer takes the place of attention is its
    teacher with windows, and the teacher itself within the window.

    Args:
        teacher: a causal language model of transformers, plain (see `check_weights`); not changed.
        keep, keep_as, family, others_as, fields: as of `student_config`.
        keep_by: how a count or share of layers is chosen, as of `choose_layers`, or of key/value groups
            ("group_recall"); None: by recall, evenly spaced with a warning if the teacher does not recall.
        tokenizer: the teacher's, for recall, and for sinks: whether all texts begin with one token.
        init: new mixers start from the "projections" of the attention that they replace (see `init_from_attention`) or
            stand beside (see `init_from_heads`), context states from those of the attention beside them (see
            `init_context`); or all of them "random".

    Returns:
        The student, in the teacher's dtype and on its device, and what became of each weight.

    Raises:
        ValueError: as of `student_config`, `init` is unknown, or the teacher holds more, less or other than the plain
            weights of its configuration: compiled, quantized, offloaded, with an adapter, without its head.
    """
    if init not in INITS:
        raise ValueError(f"init={init!r} must be one of {', '.join(map(repr, INITS))}.")
    check_weights(teacher)
    choice = _choice(teacher, keep, keep_by, tokenizer, family, fields)
    layers = keep if choice is None else choice.layers
    config = student_config(teacher.config, layers, keep_as, family, others_as, **fields)
    student = STUDENTS[family](config).to(device=teacher.device, dtype=teacher.dtype)
    report = UpcycleReport(choice=choice)
    weights, wanted = teacher.state_dict(), student.state_dict()
    filled = set()
    for name, value in weights.items():
        target = name
        for theirs, ours in NAMES[family].items():
            target = target.replace(theirs, ours)
        if target in wanted:
            report.new += _copy(value, wanted[target], target)
            filled.add(target)
            report.copied.append(name)
        elif init == "projections" and name.endswith(TRANSLATED):
            report.translated.append(name)
        else:
            report.dropped.append(name)
    report.new += sorted(wanted.keys() - filled)
    for old, new in zip(teacher.model.layers, student.model.layers):
        _init_new(old, new, init)
    init_sinks(student, teacher, tokenizer)
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student, report


def _choice(
    teacher: Any, keep: Any, keep_by: str | None, tokenizer: Any | None, family: str, fields: dict[str, Any]
) -> LayerChoice | None:
    """The layers of a Longhorn hybrid that keep their attention; refuses what a Block-State Transformer cannot use."""
    if family != "longhorn":
        if keep_by is not None:
            raise ValueError(
                f"keep_by={keep_by!r} is for Longhorn: in a BST all layers keep their attention as a window."
            )
        return None
    keep = 0.25 if keep is None else keep
    return choose_layers(teacher, keep, keep_by, tokenizer, window=fields.get("sliding_window") or WINDOW)


def _init_new(old: Any, new: Any, init: str) -> None:
    """What a layer has beyond that of its teacher."""
    if isinstance(new, LonghornHybridBlock):
        if init == "projections":
            assert new.self_attn.window.left is not None  # such layers have a window
            init_from_heads(new.mixer, old.self_attn, new.norm, new.self_attn.window.left + 1)
        close_output(new.mixer)
    elif init != "projections":
        return
    elif isinstance(new, LonghornBlock):
        if new.is_recurrent:
            init_from_attention(new.mixer, old.self_attn)
    elif isinstance(new.attention, ContextAttention):
        init_context(new.attention, new.attention_norm)


def _copy(value: torch.Tensor, target: torch.Tensor, name: str) -> list[str]:
    """Copy a weight; an output projection of the student may have more inputs, which are closed and named."""
    if not name.endswith("o_proj.weight") or target.shape == value.shape:
        target.copy_(value)
        return []
    target.zero_()
    target[:, : value.shape[1]].copy_(value)
    return [f"{name}[:, {value.shape[1]}:] (zero)"]


def new_modules(student: Student) -> list[str]:
    """The modules that upcycling put in, by name: mixers; or context states, what reads them and what adds them."""
    names = []
    layer: Any
    for index, layer in enumerate(student.model.layers):
        if isinstance(student, BstForCausalLM):
            if isinstance(layer.attention, StateAttention):
                kind = "context" if isinstance(layer.attention, ContextAttention) else "recurrent"
                names += [f"model.layers.{index}.attention.{part}" for part in (kind, "context_q_proj", "o_proj")]
        elif hasattr(layer, "mixer"):
            names.append(f"model.layers.{index}.mixer")
    return names
