# Copyright 2026 The hf-hybrid-ssm contributors.
# Licensed under the Apache License, Version 2.0: see LICENSE, or http://www.apache.org/licenses/LICENSE-2.0
"""Students: models of their teachers' own classes, with another attention function.

`student_class(LlamaForCausalLM)` is a `LlamaForCausalLM` whose base model makes the rows and the cache of this package
and hands one keyword argument down to the attention function (`hf_hybrid_ssm.students.attention`). Its weights have
their teacher's names.
"""

import copy
import inspect
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import create_masks_for_generate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils.generic import merge_with_config_defaults

from hf_hybrid_ssm.models.base import LAYER_NUMBER, HybridPreTrainedModel
from hf_hybrid_ssm.models.cache import (
    FITTERS,
    begin_forward,
    finish_forward,
    is_recurrent_state_layer,
    prepare_cache,
    read_rows,
    refuse_while_recomputing,
)
from hf_hybrid_ssm.models.columns import ColumnRows, check_cache_without_states, with_columns
from hf_hybrid_ssm.models.configuration import STATE_LAYER_TYPE
from hf_hybrid_ssm.models.generation import HybridGenerationMixin
from hf_hybrid_ssm.models.inputs import LISTED, check_arguments, check_inputs, check_is_causal
from hf_hybrid_ssm.models.outputs import CACHE, ShiftedLabelsMixin, by_both_cache_names, with_both_names
from hf_hybrid_ssm.ops.local_attention import document_ranks
from hf_hybrid_ssm.students.attention import OF_WINDOW, WindowedAttention, implementation
from hf_hybrid_ssm.students.cache import fit_student_cache
from hf_hybrid_ssm.students.configuration import PREFIX, HybridStudentConfig, LayerPlan, config_class
from hf_hybrid_ssm.students.forward import Forward, Ranks
from hf_hybrid_ssm.students.memory import add_memory, initialise
from hf_hybrid_ssm.students.sinks import Angles, ConstantSink, angles_before, turned_together
from hf_hybrid_ssm.students.teacher import AttentionLayer, attention_layers, class_of

OF_TEACHER = "full_attention"
"""Beside the mask of states, in masks made ahead of compiled decoding: what the teacher's own layers take."""
KEPT = (
    "base_model_prefix",
    "supports_gradient_checkpointing",
    "_can_compile_fullgraph",
    "_skip_keys_device_placement",
    "_supports_sdpa",
    "_can_set_attn_implementation",
    "_can_set_experts_implementation",
)
"""Attributes of a teacher's class that those of `HybridPreTrainedModel` would hide, and what transformers answers by
the source of a class's module, which has to be the teacher's."""
GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
"""Styles of tensor parallelism of a teacher's attention, and those of a student's."""
FITTERS[HybridStudentConfig.model_type] = fit_student_cache


class StudentMixin(HybridPreTrainedModel):
    """What all students' models share; placed before the teacher's class."""

    config: HybridStudentConfig
    config_class = HybridStudentConfig
    teacher_class: type[PreTrainedModel]
    auto_class: Any
    names_of_teachers: Any

    def __new__(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls if config is None else cls.for_config(config))

    def __init__(self, config: HybridStudentConfig, *args: Any, **kwargs: Any):
        # its own: what is saved with the weights stays what the layers were built from
        super().__init__(copy.deepcopy(config), *args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a student that was sent to this process, whose attention may not be known here."""
        super().__setstate__(state)
        implementation((self.config._attn_implementation or "eager").removeprefix(PREFIX))

    def _check_config(self, config: Any) -> None:
        """As of `HybridPreTrainedModel`.

        Raises:
            ValueError: `student`, changed since the configuration was made, says what cannot be.
        """
        super()._check_config(config)
        config.check_student()

    @classmethod
    def for_config(cls, config: HybridStudentConfig) -> Any:
        """The class of students of the configuration's teacher.

        Raises:
            ValueError: there is no such teacher.
        """
        if hasattr(cls, "teacher_class"):
            return cls
        return student_class(class_of(config.teacher_type, cls.names_of_teachers))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """As of `HybridPreTrainedModel`."""
        given = {} if config is None else {"config": config}
        if hasattr(cls, "teacher_class"):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **given, **kwargs)
        # by the name of the type: a folder's own code has copies of the classes
        known = getattr(config, "model_type", None) == HybridStudentConfig.model_type
        loader = cls.for_config(config) if known else cls.auto_class
        return loader.from_pretrained(pretrained_model_name_or_path, *args, **given, **kwargs)

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        concrete = cls.for_config(config)
        return super()._from_config(config, **kwargs) if concrete is cls else concrete._from_config(config, **kwargs)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The students' attention, with the one that was asked for where it is the teacher's own."""
        asked = None if requested_attention is None else requested_attention.removeprefix(PREFIX)
        return implementation(super().get_correct_attn_implementation(asked, is_init_check))

    def post_init(self) -> None:
        super().post_init()
        self._keep_in_fp32_modules_strict |= set(self.teacher_class._keep_in_fp32_modules_strict or ())

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        if isinstance(module, ConstantSink):
            init.zeros_(module.key)
            init.zeros_(module.value)
        elif not initialise(module):
            super()._init_weights(module)

    def _why_no_attentions(self) -> str | None:
        return None if all(layer.is_own for layer in self.config.plan.layers) else super()._why_no_attentions()


class HybridStudentModel(StudentMixin):
    """The base model of a student; `HybridStudentModel(config)` is of the class for the configuration's teacher."""

    auto_class = AutoModel
    names_of_teachers = MODEL_MAPPING_NAMES
    known_arguments: frozenset[str]
    is_bidirectional, uses_positions = False, True
    counts_documents = False
    """Some memory needs to know how many documents a row holds at most."""

    def __init__(self, config: HybridStudentConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.become_student()

    def become_student(self) -> None:
        """Add what layers have beyond the teacher's.

        Raises:
            ValueError: the teacher's attention is not what a student needs, or not where the configuration says.
        """
        layers = attention_layers(self.config, self.config.teacher_type)
        self.places: dict[tuple[Any, int], list[Any]] = {}  # of constant sinks that are turned, with their layers
        for index, plan in enumerate(self.config.plan.layers):
            if plan.is_own:
                continue
            if index not in layers:
                raise ValueError(f"student.layers[{index}]: the teacher has no attention there.")
            module = self.get_submodule(layers[index].name)
            rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if plan.is_windowed:
                self._add_window(index, plan, layers[index], rotate)
            if plan.memory is not None:
                add_memory(self, index, plan, layers[index], rotate, dict(self.config.plan.memory))
                self.counts_documents |= self.config.plan.memory.get("context_variant") == "mf"
        self.post_init()

    def _add_window(self, index: int, plan: LayerPlan, layer: AttentionLayer, rotate: Any) -> None:
        if plan.sink is not None and layer.has_sink:
            raise ValueError(
                f"student.layers[{index}].sink={plan.sink!r}: the teacher has sinks of its own; give None."
            )
        if plan.sink == "constant" and layer.turned is None:
            raise ValueError(
                f"student.layers[{index}].sink='constant': {layer.name} turns its keys in a way of its own; give "
                "'first_token'."
            )
        module: Any = self.get_submodule(layer.name)
        place: Any = (self._layer_type(index), plan.window) if plan.sink == "constant" and layer.turned else None
        module.windowed = WindowedAttention(index, plan, layer.groups, self.config.plan, place)
        if plan.sink == "constant":
            sizes = layer.groups - len(plan.groups), layer.key_size, layer.value_size
            module.sink = ConstantSink(*sizes, layer.turned or 0, rotate)
        if place is not None:
            self.places.setdefault(place, []).append(module)

    def _layer_type(self, index: int) -> str | None:
        """What the teacher's rotary embedding is told of a layer; None if nothing."""
        rotary = getattr(self, "rotary_emb", None)
        is_told = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
        return self.config.layer_types[index] if is_told else None

    def init_parallel_plans(self) -> None:
        """Groups, sinks and memories are counted over all heads: the heads of attention are gathered first."""
        super().init_parallel_plans()
        layers = attention_layers(self.config, self.config.teacher_type).values()
        attention = tuple({f"{LAYER_NUMBER.sub('*', layer.name)}." for layer in layers})
        of_attention = {rule: style for rule, style in self.tp_plan.items() if rule.startswith(attention)}
        self._tp_plan = self.tp_plan | {rule: GATHERED.get(style, style) for rule, style in of_attention.items()}

    @merge_with_config_defaults
    @by_both_cache_names
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        seq_idx: torch.IntTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        continues_documents: bool = False,
        student: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As the teacher's; padding, documents and caches as of `HybridModelMixin.forward`.

        Args:
            student: stands in the place of `Forward`, to see what the attention layers hand on.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, **kwargs}
        if student is not None:
            return super().forward(**inputs, position_ids=position_ids, use_cache=False, student=student)
        if not (written := self.config._attn_implementation or "eager").startswith(PREFIX):
            # as programs write to it that calibrate: the teacher's whole attention would run, without a word
            self.config._attn_implementation = implementation(written)
        check_arguments(self, {name: value for name, value in kwargs.items() if name not in self.known_arguments})
        check_is_causal(self, kwargs)
        self._refuse_attentions(kwargs.get("output_attentions"))
        check_inputs(input_ids, inputs_embeds, self.config.vocab_size, self.config.hidden_size)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        if refuse_while_recomputing(self, cache):
            cache = None
        if use_cache or cache is not None:
            cache = prepare_cache(cache, self.config, *given.shape[:2])
        masks = attention_mask if isinstance(attention_mask, dict) else None  # made ahead of compiled decoding
        documents = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q, "continues_documents": continues_documents}
        rows = self._rows(given, cache, attention_mask, position_ids=position_ids, **documents)
        check_cache_without_states(cache, rows)
        if inputs_embeds is not None and rows.token_mask is not None:  # 0, the weight of padding, times NaN is NaN
            inputs["inputs_embeds"] = torch.where(rows.token_mask.unsqueeze(-1), inputs_embeds, 0.0)
        positions: Any = self._positions(rows, cache, given.device) if position_ids is None else position_ids
        own_mask = rows.full_token_mask if masks is None else masks[OF_TEACHER]
        forward = Forward(rows, cache, self._query_scale(positions), *self._for_sinks(rows, cache, positions))
        begin_forward(cache)
        output = super().forward(
            **inputs,
            attention_mask=own_mask,
            position_ids=positions,
            use_cache=use_cache,
            **{CACHE: cache},
            student=forward,
        )
        finish_forward(cache, self)
        return with_both_names(output)

    def _rows(
        self, given: torch.Tensor, cache: Cache | None, attention_mask: Any, *, seq_idx: Any, **documents: Any
    ) -> ColumnRows:
        """How the rows of a forward are read.

        Raises:
            ValueError: as of `resolve_packing`; or rows pack documents, and a layer of the teacher's knows of none.
        """
        kinds = self.config.plan.own_kinds
        prepared = isinstance(attention_mask, dict)
        mask = attention_mask[STATE_LAYER_TYPE] if prepared else attention_mask
        documents |= {"seq_idx": seq_idx, "counts_documents": self.counts_documents}
        read = read_rows(cache, given.shape[:2], attention_mask=mask, **documents)
        keeps_padding = bool({"full", "none"} & kinds) and not prepared
        rows = with_columns(read, mask, needs_starts="full" in kinds, keeps_padding=keeps_padding)
        if "none" in kinds and (rows.documents is not None or rows.starts_new_document is not None):
            raise ValueError("packed rows: layers of this teacher without attention would read across documents.")
        return rows

    def _positions(self, rows: ColumnRows, cache: Cache | None, device: torch.device) -> torch.Tensor:
        """(B or 1, L) int64, the real tokens before each token in its document."""
        if not self.config.plan.has_windows:
            return rows.positions(device)
        ranks = _ranks(rows, cache, device)
        return ranks if rows.padding is None else rows.repad(ranks.expand(rows.padding.lengths.shape[0], -1))

    def _for_sinks(
        self, rows: ColumnRows, cache: Cache | None, position_ids: torch.Tensor
    ) -> tuple[Ranks | None, dict[tuple[Any, int], Angles], dict[int, torch.Tensor]]:
        """`Forward.ranks`, `Forward.angles` and `Forward.sink_keys`."""
        ranks = Ranks(_ranks(rows, cache, position_ids.device)) if self.config.plan.has_sinks else None
        angles: dict[tuple[Any, int], Angles] = {}
        keys: dict[int, torch.Tensor] = {}
        for place, layers in self.places.items():
            if ranks is None or ranks.without_sink(place[1]) is True:
                continue
            # both in one call: some kinds of rotary positions choose their frequencies by the largest position
            distance = position_ids.new_full((position_ids.shape[0], 1), place[1] + 1)
            cos, sin = self.angles_at(torch.cat([position_ids, distance], 1), place[0])
            angles[place] = angles_before((cos[:, :-1], sin[:, :-1]), (cos[:, -1:], sin[:, -1:]))
            if rows.is_step:
                keys |= turned_together(layers, angles[place])
        return ranks, angles, keys

    def angles_at(self, position_ids: torch.Tensor, layer_type: str | None) -> Angles:
        """Of the teacher's rotary embedding at the positions (B, L)."""
        x = torch.empty(0, dtype=self.get_input_embeddings().weight.dtype, device=position_ids.device)
        return self.rotary_emb(x, position_ids, *(() if layer_type is None else (layer_type,)))

    def _query_scale(self, position_ids: torch.Tensor) -> torch.Tensor | None:
        """(B or 1, L) float32, what multiplies queries that see all tokens; None for 1."""
        plan = self.config.plan
        if plan.attn_scale == 0:
            return None
        return 1 + plan.attn_scale * torch.log1p(torch.floor((position_ids + 1).float() / plan.floor_scale))


def _ranks(rows: ColumnRows, cache: Cache | None, device: torch.device) -> torch.Tensor:
    """(B or 1, L) int64, the tokens before each token in its document, of rows whose real tokens come first."""
    seen = None
    for layer in () if cache is None else cache.layers:
        states = layer.states if is_recurrent_state_layer(layer) else {}
        if (known := states.get("seen", states.get(OF_WINDOW + "seen"))) is not None:  # the same in all layers
            seen = rows.continued({"seen": known})["seen"].to(device)
            break
    return document_ranks(rows.length, seen=seen, seq_idx=rows.seq_idx, device=device)


class HybridStudentForCausalLM(ShiftedLabelsMixin, HybridGenerationMixin, StudentMixin, GenerationMixin):
    """A student; `HybridStudentForCausalLM(config)` is of the class for the configuration's teacher."""

    auto_class = AutoModelForCausalLM
    names_of_teachers = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def __init__(self, config: HybridStudentConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        base: Any = self.base_model
        base.__class__ = student_class(type(base))
        base.become_student()
        self.post_init()

    def create_masks_for_generate(
        self, config: Any, inputs_embeds: Any, attention_mask: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Masks made ahead of compiled decoding: of the teacher's own layers, and of the padding."""
        make = getattr(super(HybridGenerationMixin, self), "create_masks_for_generate", create_masks_for_generate)
        own = make(config, inputs_embeds, attention_mask, **kwargs)
        return super().create_masks_for_generate(config, inputs_embeds, attention_mask, **kwargs) | {OF_TEACHER: own}


def student_class(teacher: Any) -> Any:
    """The class of students of a teacher's class: a language model, or the base model of one."""
    if teacher not in _MADE:
        _MADE[teacher] = _make_class(teacher)
    return _MADE[teacher]


_MADE: dict[Any, Any] = {}


def _make_class(teacher: Any) -> Any:
    is_base = not issubclass(teacher, GenerationMixin)
    own = re.sub(r"(For[A-Z]\w*|Model)$", r"Student\1", teacher.__name__)
    model_type = teacher.config_class.model_type
    members = {
        "__module__": __name__,
        "__qualname__": own,  # by which whoever unpickles it asks for the class
        "__doc__": f"`{teacher.__name__}` as a student.",
        "teacher_class": teacher,
        "config_class": config_class(model_type),
        **{attribute: getattr(teacher, attribute) for attribute in KEPT},
    }
    if is_base:
        members["known_arguments"] = LISTED | set(inspect.signature(teacher.forward).parameters)
    else:
        members["forward"] = _forward_of(teacher.forward)
    parent: Any = HybridStudentModel if is_base else HybridStudentForCausalLM
    # language models have the name that transformers' tables know, whoever their teacher is
    made = type(own if is_base else parent.__name__, (parent, teacher), members)
    conversions = get_checkpoint_conversion_mapping(teacher.__name__) or get_checkpoint_conversion_mapping(model_type)
    if conversions is not None and is_base:  # layers are stored under other names than they have
        register_checkpoint_conversion_mapping(own, conversions, overwrite=True)
    return made


def _forward_of(forward: Callable) -> Callable:
    """A teacher's forward that takes and gives the cache by both names, and shows `seq_idx`, which the base model
    takes: `Trainer` leaves out what a signature does not show."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return with_both_names(forward(*args, **kwargs))

    shown = by_both_cache_names(call)
    signature = inspect.signature(shown)
    documents = inspect.Parameter("seq_idx", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted({"seq_idx": documents, **signature.parameters}.values(), key=lambda one: one.kind)
    shown.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return shown


def __getattr__(name: str) -> Any:
    """`LlamaStudentForCausalLM`: whoever unpickles a model asks for its class."""
    if "Student" in name:
        teacher = getattr(transformers, name.replace("Student", ""), None)
        if teacher is not None:
            return student_class(teacher)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["HybridStudentForCausalLM", "HybridStudentModel"]
