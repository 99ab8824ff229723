"""A student of a teacher that is at hand: its configuration, the same weights, and sinks made from first tokens."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from hf_hybrid_ssm.layers.plain_tensors import check_whole
from hf_hybrid_ssm.students.configuration import (
    HybridStudentConfig,
    LayerPlan,
    Student,
    config_class,
    fields_of,
    key_value_groups,
    teacher_attention,
    unchanged,
)
from hf_hybrid_ssm.students.forward import own_attention
from hf_hybrid_ssm.students.initial_context import init_context
from hf_hybrid_ssm.students.initial_heads import init_from_heads
from hf_hybrid_ssm.students.initial_projections import init_from_attention
from hf_hybrid_ssm.students.memory import HEADS, ContextMemory, HeadMixer, MemoryInstead
from hf_hybrid_ssm.students.modeling import student_class
from hf_hybrid_ssm.students.norm_gains import input_gains
from hf_hybrid_ssm.students.teacher import attention_layers

WINDOW = 512
TEXTS = ("a", "The")
TOKENS = 256
"""How many tokens of the vocabulary a sink is the mean of, where no token begins every text or conversation."""
MOST_LOSS = 0.02
"""Nats a token that constant sinks may cost beside the first tokens that they stand for."""


def student_config(
    teacher: PreTrainedConfig,
    keep: Sequence[Any] = (),
    window: int = WINDOW,
    sink: str | None = "constant",
    attn_scale: float = 0.0,
    floor_scale: int | None = None,
    memory: str | None = None,
    memory_layers: Sequence[int] | None = None,
    instead: bool = False,
    window_dropout: float = 0.0,
    **fields: Any,
) -> HybridStudentConfig:
    """The configuration of a student whose layers get windows, but for those that keep their attention.

    Layers of the teacher that have windows, or no attention, stay as they are.

    Args:
        teacher: of a decoder of transformers.
        keep: layers whose attention to all tokens is kept; or single key/value groups, as (layer, group).
        window: W, the tokens that a token sees before its own.
        sink: of these windows (see `LayerPlan`); where the teacher has sinks of its own there is none.
        attn_scale, floor_scale, window_dropout: as of `Student`; `floor_scale` is W + 2 by default.
        memory: of these layers (see `LayerPlan`), or of those in `memory_layers`.
        instead: the memory takes the place of attention, without a window.
        fields: of the memory's configuration (see `Student`).

    Raises:
        ValueError: it cannot be a teacher, or has no such layer or group that sees all tokens.
    """
    found = attention_layers(teacher)
    own, groups = teacher_attention(teacher), key_value_groups(teacher)
    kept = {(part, group) for part in keep if isinstance(part, int) for group in range(groups)}
    kept |= {tuple(part) for part in keep if not isinstance(part, int)}
    see_all = {index for index, (kind, _) in enumerate(own) if kind == "full"}
    if unknown := sorted(part for part in kept if part[0] not in see_all or part[1] not in range(groups)):
        raise ValueError(
            f"keep names layer {unknown[0][0]}, group {unknown[0][1]}, but the teacher sees all tokens in the layers "
            f"{sorted(see_all)}, with the key/value groups 0 to {groups - 1}."
        )
    layers = []
    for index, (kind, reach) in enumerate(own):
        of_layer = tuple(group for group in range(groups) if (index, group) in kept)
        if kind != "full" or len(of_layer) == groups:
            layers.append(unchanged(kind, reach))
        elif (own_memory := memory if memory_layers is None or index in memory_layers else None) and instead:
            layers.append(LayerPlan("none", memory=own_memory))
        else:
            own_sink = None if found[index].has_sink else sink
            layers.append(LayerPlan("window", window, of_layer, own_sink, own_memory))
    floor = window + 2 if floor_scale is None else floor_scale
    student = Student(tuple(layers), float(attn_scale), floor, fields, window_dropout)
    return config_class(teacher.model_type)(student=student.to_dict(), **fields_of(teacher))


@torch.no_grad()
def student_of(
    teacher: PreTrainedModel, config: HybridStudentConfig | None = None, tokenizer: Any | None = None, **plan: Any
) -> Any:
    """A student with copies of its teacher's weights, and sinks as of `init_sinks`.

    Args:
        teacher: a language model of transformers; not changed.
        config: of the student; None: as of `student_config` with `plan`.
        tokenizer: the teacher's, for the sinks.

    Returns:
        The student, in the teacher's dtype, on its device and in its mode.

    Raises:
        ValueError: as of `student_config`; or the teacher holds other weights than those of its class, or parts of
            them (DeepSpeed).
    """
    check_whole(teacher, "teacher")
    config = student_config(teacher.config, **plan) if config is None else config
    with init.no_init_weights():
        student = student_class(type(teacher))._from_config(config, dtype=teacher.dtype)
    student.tie_weights()
    for name, module in reversed(list(student.named_modules())):  # children first
        if "memory" in name.split("."):
            student._init_weights(module)
    student.to(teacher.device)
    replaced = tuple(f"{name}." for name, part in student.named_modules() if isinstance(part, MemoryInstead))
    found = student.load_state_dict(teacher.state_dict(), strict=False)
    if others := [name for name in found.unexpected_keys if not name.startswith(replaced)]:
        raise ValueError(f"the teacher has {others[0]}, which its class does not: give a plain model.")
    student.generation_config = copy.deepcopy(teacher.generation_config)
    init_sinks(student, first_token_ids(teacher.config.vocab_size, tokenizer))
    return student.train(teacher.training)


@torch.no_grad()
def init_memories(student: Any, teacher: Any) -> None:
    """Let memories start from the teacher's attention that they stand beside (`init_from_heads`, `init_context`) or
    replace (`init_from_attention`); those beside a window stay closed.

    Raises:
        ValueError: that attention has no projections of its own for queries, keys, values and output.
    """
    base, own = student.base_model, attention_layers(teacher.config)
    attention = {index: teacher.base_model.get_submodule(layer.name) for index, layer in own.items()}
    modules = {index: base.get_submodule(layer.name) for index, layer in own.items()}
    memories: dict[int, Any] = {index: each.memory for index, each in modules.items() if hasattr(each, "memory")}
    for index in memories:
        if missing := [name for name in sorted(HEADS) if not hasattr(attention[index], name)]:
            raise ValueError(
                f'init="projections": {own[index].name} of the teacher has no {missing[0]}; give init="random".'
            )
    beside = {
        index: attention[index] for index, memory in memories.items() if isinstance(memory, HeadMixer | ContextMemory)
    }
    gains = input_gains(teacher, beside) if beside else {}
    for index, memory in memories.items():
        if isinstance(memory, HeadMixer):
            window = student.config.plan.layers[index].window
            init_from_heads(memory, attention[index], gains[index], window + 1)
        elif isinstance(memory, ContextMemory):
            init_context(memory, attention[index], gains[index])
        else:
            init_from_attention(memory, attention[index])


@torch.no_grad()
def init_sinks(student: Any, input_ids: torch.Tensor) -> None:
    """Set the constant sinks of a student: for each the mean key, as it is at position 0, and value of first tokens.

    Args:
        student: a language model; its attention to all tokens is its teacher's.
        input_ids: (N, 1), texts of one token.
    """
    base = student.base_model
    sinks = {module.layer_idx: module for module in base.modules() if getattr(module, "sink", None) is not None}
    if not sinks:
        return
    training, seen = student.training, _FirstTokens()
    input_ids = input_ids.to(student.device)
    student.eval()
    try:
        base(input_ids=input_ids, position_ids=torch.zeros_like(input_ids), student=seen)
    finally:
        student.train(training)
    for index, module in sinks.items():
        key, value = seen.by_layer[index]
        place, groups = module.windowed.place, module.windowed.parts[-1][1]
        if place is not None:  # some kinds of rotary positions scale keys as well: once, when the sink is read
            cos, sin = base.angles_at(torch.zeros_like(input_ids[:1]), place[0])
            key = module.sink.turn(key, (1 / cos, sin))
        dtype = torch.promote_types(key.dtype, torch.float32)
        module.sink.key.copy_(key.to(dtype).mean(0)[groups, 0])
        module.sink.value.copy_(value.to(dtype).mean(0)[groups, 0])


@dataclass(frozen=True)
class SinkChoice:
    """Which sink a student's windows have, and why: a constant one that costs little beside real first tokens.

    Args:
        sink: as of `LayerPlan`.
        constant, first_token: nats a token with either, over the tokens whose windows have left the first one.
        tokens: how many these are.
    """

    sink: str
    constant: float
    first_token: float
    tokens: int

    def __str__(self) -> str:
        why = "hold" if self.sink == "constant" else "do not hold: the cache keeps the first token's key instead"
        return (
            f"Constant sinks {why} ({self.constant:.3f} nats a token, {self.first_token:.3f} with the first token "
            f"itself, over {self.tokens:,} tokens)."
        )


@torch.no_grad()
def choose_sink(student: Any, input_ids: torch.Tensor) -> SinkChoice:
    """Keep a student's constant sinks if they are as good as the real first tokens of texts; else let the cache keep
    these ("first_token").

    Args:
        student: a language model with constant sinks.
        input_ids: (B, L), texts from their first token on, without padding.

    Raises:
        ValueError: the student has no constant sink, or the texts are no longer than a window.
    """
    layers = [module for module in student.base_model.modules() if getattr(module, "sink", None) is not None]
    first = 1 + max((module.windowed.left for module in layers), default=0)
    if not layers or input_ids.shape[1] <= first + 1:
        raise ValueError(
            f"input_ids have {input_ids.shape[1]} tokens, and a student with {len(layers)} constant sinks: both the "
            f"sinks and more than {first + 1} tokens are needed."
        )
    losses, training, targets = {}, student.training, input_ids[:, first + 1 :]
    student.eval()
    for kind in ("first_token", "constant"):
        for module in layers:
            module.windowed.sink = kind
        total = 0.0
        for row, wanted in zip(input_ids, targets):  # one at a time: vocabularies may be large
            found = student(row[None].to(student.device), use_cache=False, logits_to_keep=len(wanted) + 1).logits
            wanted = wanted.to(found.device)
            total += float(torch.nn.functional.cross_entropy(found[0, :-1].float(), wanted, reduction="sum"))
        losses[kind] = total / targets.numel()
    student.train(training)
    holds = losses["constant"] <= losses["first_token"] + MOST_LOSS
    if not holds:
        set_sinks(student, "first_token")
    return SinkChoice("constant" if holds else "first_token", **losses, tokens=targets.numel())


def set_sinks(student: Any, sink: str | None) -> None:
    """Give another sink to the windows of a student that have one; constant sinks that it had go."""
    config = student.config
    layers = tuple(replace(layer, sink=sink) if layer.sink else layer for layer in config.plan.layers)
    config.student = replace(config.plan, layers=layers).to_dict()
    for module in student.base_model.modules():
        if getattr(module, "windowed", None) is not None and module.windowed.sink is not None:
            module.windowed.sink = sink
            if sink != "constant" and hasattr(module, "sink"):
                del module.sink
    student.base_model.places.clear()


class _FirstTokens:
    """Sees the keys and values (N, G, 1, e) of all layers, and lets the teacher's attention go on."""

    def __init__(self) -> None:
        self.by_layer: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        self.by_layer[module.layer_idx] = key, value
        return own_attention(module)(module, query, key, value, None, **options)


def first_token_ids(vocab_size: int, tokenizer: Any | None = None) -> torch.Tensor:
    """Token ids (N, 1): the one that the tokenizer or else its chat template begins every text with, or `TOKENS` drawn
    from the vocabulary."""
    if tokenizer is not None:
        begins = {tuple(tokenizer(text)["input_ids"][:1]) for text in TEXTS}
        if begins == {(tokenizer.bos_token_id,)}:
            return torch.tensor([[tokenizer.bos_token_id]])
        if getattr(tokenizer, "chat_template", None):
            begins = {tuple(_message(tokenizer, text)[:1]) for text in TEXTS}
            if len(begins) == 1:
                return torch.tensor([begins.pop()])
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[:TOKENS].unsqueeze(1)


def _message(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a conversation that a user begins with a text."""
    conversation = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    return tokenizer(conversation, add_special_tokens=False)["input_ids"]
