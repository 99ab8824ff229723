# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""The configuration of a student: its teacher's, and what became of each layer's attention."""

import copy
import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, PreTrainedConfig

from hf_hybrid_ssm.models.configuration import STATE_AND_KEYS_LAYER_TYPE, STATE_LAYER_TYPE, SavedWithCode

KINDS = ("full", "window", "none")
SINKS = ("constant", "first_token")
MEMORIES = ("longhorn", "context")
NOWHERE = ("context", "none")
"""Context states are read by attention: they take no place."""
SUFFIX = "StudentConfig"
PREFIX = "hybrid_student|"
"""Before the name of the attention of layers that see all tokens, in `config._attn_implementation`."""


@dataclass(frozen=True)
class LayerPlan:
    """What became of the attention of one layer.

    Args:
        attention: "full", the teacher's own; "window", where each token sees the `window` tokens before its own; or
            "none", in a layer that has no attention.
        window: W, of a layer with one.
        groups: the key/value groups that see all tokens in a layer with a window; not all of them.
        memory: "longhorn", a mixer beside the window, or in the place of attention ("none"); "context", context states
            beside the window; or None.
        sink: what takes the place of the first token where a window has left it: "constant", "first_token" (see
            `hf_hybrid_ssm.students.sinks`) or None.
    """

    attention: str = "full"
    window: int | None = None
    groups: tuple[int, ...] = ()
    sink: str | None = None
    memory: str | None = None

    @property
    def is_windowed(self) -> bool:
        return self.attention == "window"

    @property
    def is_own(self) -> bool:
        """Whether the layer, and what it keeps in a cache, is the teacher's."""
        return not self.is_windowed and self.memory is None


@dataclass(frozen=True)
class Student:
    """What a student has beyond its teacher's configuration.

    Args:
        layers: one for each.
        attn_scale, floor_scale: a and f: queries that see all tokens are multiplied by 1 + a log(1 + ⌊(p + 1) / f⌋) at
            the position p, as in Llama 4, in layers where the teacher's see all tokens. a = 0 does nothing.
        memory: fields of the memories' configuration, `LonghornConfig` or `BstConfig`.
        window_dropout: in training, the share of rows in which a memory beside a window is all that there is.
    """

    layers: tuple[LayerPlan, ...]
    attn_scale: float = 0.0
    floor_scale: int = 1
    memory: Mapping[str, Any] = field(default_factory=dict)
    window_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("own_kinds", "has_windows", "has_sinks", "cache_layer_types"):
            getattr(self, name)  # now: a graph cannot hold the lock that Python 3.11 takes for the first look

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Student":
        """Of the dictionary that a configuration holds.

        Raises:
            ValueError: it names what there is not.
        """
        _check_names("student", saved, cls)
        layers = tuple(_layer(index, layer) for index, layer in enumerate(saved.get("layers", ())))
        return cls(**{**saved, "layers": layers})

    @cached_property
    def own_kinds(self) -> frozenset[str]:
        """The attention of the layers that are the teacher's."""
        return frozenset(kind for kind in KINDS if any(one.is_own and one.attention == kind for one in self.layers))

    @cached_property
    def has_windows(self) -> bool:
        return any(layer.is_windowed for layer in self.layers)

    @cached_property
    def has_sinks(self) -> bool:
        return any(layer.sink is not None for layer in self.layers)

    @cached_property
    def cache_layer_types(self) -> list[str]:
        """As of `HybridStudentConfig`."""
        of_groups = {True: STATE_AND_KEYS_LAYER_TYPE, False: STATE_LAYER_TYPE}  # some see all tokens, or none does
        return [layer.attention if layer.is_own else of_groups[bool(layer.groups)] for layer in self.layers]

    def most_full_groups(self, groups: int) -> int:
        """The key/value groups, of so many, that see all tokens in the layer that has most of them."""
        return max((groups if layer.attention == "full" else len(layer.groups) for layer in self.layers), default=0)

    def to_dict(self) -> dict[str, Any]:
        """What `of` takes: of each layer, what is not the default."""
        layers = []
        for layer in self.layers:
            told = {name: value for name, value in asdict(layer).items() if value != getattr(LayerPlan(), name)}
            layers.append(
                {"attention": layer.attention} | told | ({"groups": list(layer.groups)} if layer.groups else {})
            )
        told = {"layers": layers, "attn_scale": self.attn_scale, "floor_scale": self.floor_scale}
        if any(layer.memory for layer in self.layers):
            told |= {"memory": dict(self.memory), "window_dropout": self.window_dropout}
        return told


def _layer(index: int, saved: Any) -> LayerPlan:
    if not isinstance(saved, Mapping):
        raise ValueError(f"student.layers[{index}]={saved!r} must be an object such as {{'attention': 'full'}}.")
    _check_names(f"student.layers[{index}]", saved, LayerPlan)
    return LayerPlan(**{**saved, "groups": tuple(saved.get("groups", ()))})


def _check_names(where: str, saved: Mapping[str, Any], kind: type) -> None:
    known = [field.name for field in fields(kind)]
    if unknown := sorted(saved.keys() - set(known)):
        raise ValueError(f"{where} has {', '.join(unknown)}, and knows {', '.join(known)}.")


@strict
class HybridStudentConfig(SavedWithCode, PreTrainedConfig):
    """
    Configuration of a student: of the class of its teacher's configuration, with every field of that, and two more.

    Args:
        teacher_type (`str`, *optional*, defaults to `"llama"`): `model_type` of the teacher.
        student (`dict`, *optional*): What became of each layer's attention, as `Student.of` takes it; None: nothing.

    `HybridStudentConfig(teacher_type=..., ...)` makes an instance of the class for that teacher, which is also one of
    the teacher's configuration class; `student_config` (`hf_hybrid_ssm.students.initial`) makes one from a teacher's.
    """

    model_type = "hybrid_student"
    teacher_config_class: ClassVar[type[PreTrainedConfig]]
    teacher_type: str = "llama"
    student: dict | None = None

    def __new__(cls, *args: Any, **fields: Any) -> "HybridStudentConfig":
        if not hasattr(cls, "teacher_config_class"):
            cls = config_class(fields.get("teacher_type", "llama"))
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.student is None:
            self.student = Student(tuple(unchanged(*own) for own in teacher_attention(self))).to_dict()
        self.check_student()

    @property
    def plan(self) -> Student:
        """`student`, read once."""
        read = self.__dict__.get("_read")
        if read is None or read[0] is not self.student:
            read = self.__dict__["_read"] = self.student, Student.of(self.student or {})
        return read[1]

    @property
    def cache_layer_types(self) -> list[str]:
        """What `prepare_cache` expects: this package's layers, or the teacher's."""
        return self.plan.cache_layer_types[: self.num_hidden_layers]  # fewer while generation exits early

    def to_dict(self) -> dict[str, Any]:
        """As in transformers."""
        output = super().to_dict()
        output.pop("_read", None)
        return output

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, of the class for the teacher."""
        teacher_type = config_dict.get("teacher_type")
        if not hasattr(cls, "teacher_config_class"):
            cls = config_class(teacher_type)
        return super().from_dict(config_dict, **kwargs)

    def teacher_config(self) -> PreTrainedConfig:
        """The teacher's own configuration."""
        others = {name: value for name, value in fields_of(self).items() if name not in ("student", "teacher_type")}
        return self.teacher_config_class(**others)

    def check_student(self) -> None:
        """Read `student` anew, which may have been changed in place.

        Raises:
            ValueError: a layer's attention cannot be what it says.
        """
        self.__dict__.pop("_read", None)
        plan, own = self.plan, teacher_attention(self)
        if len(plan.layers) != len(own):
            raise ValueError(f"student.layers has {len(plan.layers)} entries, but num_hidden_layers={len(own)}.")
        for index, (layer, (kind, reach)) in enumerate(zip(plan.layers, own)):
            if reason := _why_not(layer, kind, reach, key_value_groups(self)):
                joint = "." if reason.partition("=")[0] in vars(layer) else ": "
                raise ValueError(f"student.layers[{index}]{joint}{reason}.")
        if not 0 <= plan.window_dropout < 1:
            raise ValueError(f"student.window_dropout={plan.window_dropout} must lie in [0, 1).")
        if plan.attn_scale < 0 or plan.floor_scale < 1:
            raise ValueError(
                f"student.attn_scale={plan.attn_scale} must be at least 0, floor_scale={plan.floor_scale} at least 1."
            )
        if plan.attn_scale and any(kind == "other" for kind, _ in own):
            raise ValueError(f"student.attn_scale={plan.attn_scale} is for layers that see all tokens or windows.")


def _why_not(layer: LayerPlan, kind: str, reach: int | None, groups: int) -> str | None:
    """What is wrong with a layer whose attention in the teacher is of that kind, with windows of that reach."""
    if layer.attention not in KINDS:
        return f"attention={layer.attention!r} must be one of {', '.join(map(repr, KINDS))}"
    if layer.memory not in (None, *MEMORIES):
        return f"memory={layer.memory!r} must be one of {', '.join(map(repr, MEMORIES))}, or None"
    if layer.memory and (kind == "none" or layer.attention == "full" or (layer.memory, layer.attention) == NOWHERE):
        return f"memory={layer.memory!r} beside attention={layer.attention!r}, where the teacher's is {kind!r}"
    if (layer.attention == "none") != (kind == "none" or layer.memory is not None) and not layer.is_windowed:
        return f"attention={layer.attention!r}, but the teacher's is {kind!r}"
    if not layer.is_windowed:
        if kind == "window" and layer.memory is None:
            return f"the teacher has a window of {reach} tokens there, which must be one of the student's"
        extra = [name for name in ("window", "groups", "sink") if getattr(layer, name)]
        return f"{extra[0]} is for attention='window'" if extra else None
    if kind == "other":
        return "the teacher's attention is neither to all tokens nor to a window before each"
    if not isinstance(layer.window, int) or layer.window < 1:
        return f"window={layer.window!r} must be a number of tokens, at least 1"
    if reach is not None and layer.window > reach:
        return f"window={layer.window} is wider than the teacher's, which sees {reach} tokens before each"
    if reach is not None and (layer.groups or layer.sink):
        return "groups and sinks take the place of attention to all tokens, and the teacher's has a window"
    if layer.sink not in (None, *SINKS):
        return f"sink={layer.sink!r} must be one of {', '.join(map(repr, SINKS))}, or None"
    if sorted(set(layer.groups)) != list(layer.groups) or not set(layer.groups) < set(range(groups)):
        return f"groups={list(layer.groups)} must be some of 0 to {groups - 1} in order, and not all"
    return None


def unchanged(kind: str, reach: int | None) -> LayerPlan:
    """A layer whose attention stays the teacher's."""
    return LayerPlan("window", reach) if kind == "window" else LayerPlan("none" if kind == "none" else "full")


def teacher_attention(config: Any) -> list[tuple[str, int | None]]:
    """For each layer of a decoder "full", "window" with the tokens that it sees before each, "other" (chunks, sparse
    attention) or "none" (a convolution, a recurrence)."""
    window, names = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if names is None:
        chunked = getattr(config, "attention_chunk_size", None) is not None
        name = "sliding_attention" if window is not None else "chunked_attention" if chunked else "full_attention"
        names = [name] * config.num_hidden_layers
    kinds = {"full_attention": "full", "sliding_attention": "window", "conv": "none", "linear_attention": "none"}
    reach = None if window is None else window - 1  # transformers' windows count the token itself
    return [(kinds.get(name, "other"), reach if name == "sliding_attention" else None) for name in names]


def key_value_groups(config: Any) -> int:
    """Of each layer's attention."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """All that a configuration of the teacher's class is made of, a teacher's or a student's."""
    ignored = {"_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"}
    fields = {name: value for name, value in config.to_dict().items() if name not in ignored}
    attention = config._attn_implementation
    return copy.deepcopy(fields) | {"attn_implementation": attention and attention.removeprefix(PREFIX)}


@cache
def config_class(teacher_type: Any) -> type[HybridStudentConfig]:
    """The class of students of a model type.

    Raises:
        ValueError: transformers has no such type, or it is a student itself.
    """
    if teacher_type not in CONFIG_MAPPING or teacher_type == HybridStudentConfig.model_type:
        raise ValueError(f"teacher_type={teacher_type!r} is not a model type of transformers that can be a teacher.")
    teacher = CONFIG_MAPPING[teacher_type]
    names = {
        "__module__": __name__,
        # by its name transformers' Auto classes find the model; by the other, whoever unpickles the class
        "__qualname__": teacher.__name__.removesuffix("Config") + SUFFIX,
        "__annotations__": {"teacher_type": str},
        "teacher_type": teacher_type,
        "teacher_config_class": teacher,
        "model_type": HybridStudentConfig.model_type,
        "__doc__": HybridStudentConfig.__doc__,
    }
    return strict(type(HybridStudentConfig.__name__, (HybridStudentConfig, teacher), names))


def __getattr__(name: str) -> Any:
    if name.endswith(SUFFIX):
        teacher = getattr(importlib.import_module("transformers"), name.removesuffix(SUFFIX) + "Config", None)
        if teacher is not None:
            return config_class(teacher.model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["HybridStudentConfig", "LayerPlan", "Student"]
