"""From a teacher to its student: the same weights, and what is new beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_hybrid_ssm.hub.configurations import check_fields, without_memory
from hf_hybrid_ssm.models.bst.configuration_bst import BstConfig
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import LonghornConfig
from hf_hybrid_ssm.students.configuration import HybridStudentConfig, teacher_attention
from hf_hybrid_ssm.students.initial import SinkChoice, choose_sink, init_memories, student_config, student_of
from hf_hybrid_ssm.students.modeling import student_class
from hf_hybrid_ssm.students.sinks import ConstantSink
from hf_hybrid_ssm.students.teacher import attention_layers, class_of
from hf_hybrid_ssm.upcycle.choice import Keep, LayerChoice, choose_layers
from hf_hybrid_ssm.upcycle.divergence import text_of
from hf_hybrid_ssm.upcycle.probe_prompts import made_text
from hf_hybrid_ssm.upcycle.teacher import Teacher, layers_of

ATTN_SCALE = 0.1
"""As in Llama 4."""
OF_TEACHER = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window")
"""Fields of a memory that its teacher decides."""
INITS = ("projections", "random")
AUTO = "auto"
BEYOND = 512
"""Tokens of a text whose window has left the first one, by which sinks are chosen."""


@dataclass
class UpcycleReport:
    """What became of a teacher.

    Attributes:
        choice: which layers keep their attention to all tokens, and why.
        sink: which sink the windows have, and why; None where it was given.
        copied: tensors that are the teacher's, by name.
        dropped: of the teacher's, those of attention that a memory has replaced.
        new: of the student, those that its teacher does not have.
    """

    choice: LayerChoice
    sink: SinkChoice | None = None
    copied: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [str(self.choice)] + ([] if self.sink is None else [str(self.sink)])
        lines.append(f"{len(self.copied)} tensors are the teacher's.")
        for name in ("dropped", "new"):
            if names := getattr(self, name):
                lines.append(f"{name}: {', '.join(names)}")
        return "\n".join(lines)


def config_of(
    teacher: PreTrainedConfig,
    keep: Keep | LayerChoice,
    *,
    memory: str | None = None,
    instead: bool = False,
    memory_layers: Sequence[int] | None = None,
    sink: str | None = AUTO,
    attn_scale: float | None = None,
    window_dropout: float = 0.0,
    **memory_fields: Any,
) -> HybridStudentConfig:
    """The configuration of the student that `upcycle` makes, before anything is ranked or read; arguments and errors
    are the same."""
    parts = keep.layers if isinstance(keep, LayerChoice) else keep.parts_of(teacher)
    given = {"instead": instead, "memory_layers": memory_layers, "window_dropout": window_dropout}
    _check_memory(memory, memory_fields, [name for name, value in given.items() if value])
    if unknown := sorted(set(memory_layers or ()) - set(layers_of(teacher))):
        raise ValueError(
            f"memory_layers={memory_layers} names {unknown[0]}, where the teacher does not see all tokens."
        )
    if sink == AUTO:
        sink = (
            "first_token" if any(layer.turned is None for layer in attention_layers(teacher).values()) else "constant"
        )
    plan: dict[str, Any] = {"keep": parts, "window": keep.window, "sink": sink}
    plan |= {"memory": memory, "instead": instead, "memory_layers": memory_layers, "window_dropout": window_dropout}
    config = student_config(teacher, **plan, **memory_fields)
    own = teacher_attention(teacher)
    if not any(kind == "full" for kind, _ in own):
        raise ValueError(
            f"no layer of the teacher (model_type={teacher.model_type!r}) sees all tokens: its cache does not grow."
        )
    if attn_scale is None:
        with_sinks = any(layer.sink is not None for layer in config.plan.layers)
        sees_all = any(layer.attention == "full" or layer.groups for layer in config.plan.layers)
        only_full = all(kind in ("full", "none") for kind, _ in own)
        attn_scale = ATTN_SCALE if with_sinks and sees_all and only_full else 0.0
    config = student_config(teacher, **plan, attn_scale=attn_scale, **memory_fields) if attn_scale else config
    if memory is not None:  # its fields are checked as it is made
        without_memory(lambda: student_class(class_of(teacher.model_type))._from_config(config))
    return config


def _check_memory(memory: str | None, fields: dict[str, Any], others: Sequence[str]) -> None:
    """
    Raises:
        ValueError: there is no memory of these fields and `others`, or one of them is the teacher's.
    """
    if memory is None and (fields or others):
        raise ValueError(
            f"{', '.join([*sorted(fields), *others])}: of a memory, and there is none; give memory=, or leave it out."
        )
    if fixed := sorted(fields.keys() & set(OF_TEACHER)):
        raise ValueError(f"{', '.join(fixed)} of a memory must be its teacher's: leave it out.")
    if fields:
        check_fields(BstConfig if memory == "context" else LonghornConfig, fields)


@torch.no_grad()
def upcycle(
    teacher: Teacher,
    keep: Keep | LayerChoice | None = None,
    *,
    memory: str | None = None,
    instead: bool = False,
    memory_layers: Sequence[int] | None = None,
    sink: str | None = AUTO,
    attn_scale: float | None = None,
    init: str = "projections",
    window_dropout: float = 0.0,
    text: torch.Tensor | None = None,
    **memory_fields: Any,
) -> tuple[Any, UpcycleReport]:
    """A student that starts from a trained transformer: of its class, with its weights, and windows in most layers.

    Until it is trained, a student in which no memory takes the place of attention is its teacher with windows, and the
    teacher itself within the window.

    Args:
        teacher: not changed.
        keep: what keeps its attention to all tokens (`Keep`), or what `choose_layers` chose of it.
        memory: "longhorn", a mixer, or "context", context states of a Block-State Transformer; beside the windows.
        instead: the memory ("longhorn") takes the place of attention.
        memory_layers: those of the layers with windows that have it; None: all.
        sink: of the windows: "constant", "first_token" or None (see `hf_hybrid_ssm.students.sinks`); "auto": constant
            where that is as good on a text (see `choose_sink`), else the first token.
        attn_scale: of queries that see all tokens (see `Student`): few layers find one token among many with sharper
            queries. None: 0.1 where some see all tokens beside windows with sinks, of a teacher that has no windows;
            else 0.
        init: memories start from the "projections" of the attention that they stand beside or replace, or "random".
        window_dropout: in training, the share of rows in which a memory beside a window is all that there is.
        text: token ids (B, L) from first tokens on, for "auto"; None: made sentences, or what the teacher writes.
        memory_fields: of the memory's configuration, `LonghornConfig` or `BstConfig`.

    Returns:
        The student, in the teacher's dtype and on its device, and what became of the teacher.

    Raises:
        ValueError: as of `choose_layers` and `student_config`; or no layer of the teacher sees all tokens.
    """
    if init not in INITS:
        raise ValueError(f"init={init!r} must be one of {', '.join(map(repr, INITS))}.")
    keep = Keep() if keep is None else keep
    options: dict[str, Any] = {
        "memory": memory, "instead": instead, "memory_layers": memory_layers, "sink": sink, "attn_scale": attn_scale,
        "window_dropout": window_dropout, **memory_fields,
    }  # fmt: skip
    config_of(teacher.config, keep, **options)  # refuses before anything takes long
    choice = choose_layers(teacher, keep) if isinstance(keep, Keep) else keep
    student = student_of(teacher.model, config_of(teacher.config, choice, **options), teacher.tokenizer)
    if memory is not None and init == "projections":
        init_memories(student, teacher.model)
    tested = None
    if sink == AUTO and constant_sinks(student):
        if text is None:
            text = _text(teacher, keep.window)
        if text.shape[1] > keep.window + 2:
            tested = choose_sink(student, text)
    own, ours = teacher.model.state_dict().keys(), student.state_dict().keys()
    report = UpcycleReport(choice, tested, sorted(own & ours), sorted(own - ours), sorted(ours - own))
    return student, report


def _text(teacher: Teacher, window: int) -> torch.Tensor:
    """A text for `choose_sink`, (1, L): some tokens more than a window, or what the teacher has positions for."""
    length = min(window + 2 + BEYOND, teacher.config.max_position_embeddings)
    text = made_text(teacher.tokenizer, length)
    return text_of(teacher, 1, length) if text is None else text


def new_modules(student: Any) -> list[str]:
    """The memories of a student, by name."""
    return [name for name, _ in student.named_modules() if name.endswith(".memory")]


def constant_sinks(student: Any) -> list[str]:
    """The constant sinks of a student, by name."""
    return [name for name, module in student.named_modules() if isinstance(module, ConstantSink)]
