"""Which models can be teachers, and what a student has to know of their attention.

A teacher is looked at by running it on the meta device, where nothing is computed: its attention layers come by one
after the other, and what each hands to transformers' attention interface says all.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import TransformersKwargs

from hf_hybrid_ssm.layers.plain_tensors import plain_tensors
from hf_hybrid_ssm.models.longhorn.configuration_longhorn import ROPE_BY_LENGTH

LOOKED_AT = "hybrid_student_looks"
ADVICE = "Take another decoder with rotary positions, such as a Llama, Qwen3, OLMo 2, Gemma 3 or Granite."
# what attention layers hand on besides queries, keys, values and the mask
UNDERSTOOD = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "use_cache", "is_causal"}
UNDERSTOOD |= {"output_attentions", *TransformersKwargs.__annotations__}


@dataclass(frozen=True)
class AttentionLayer:
    """The attention of one layer of a teacher.

    Args:
        name: of the module, in the base model.
        heads, groups: of queries, and of keys and values.
        key_size, value_size: of a head.
        turned: how many of a key's first channels `apply_rotary_pos_emb` of the attention's module turns by the angles
            of the base model's `rotary_emb`; 0 where keys are not turned, None where they are in another way.
        has_sink: it has logits of its own beside those of the keys (gpt-oss).
    """

    name: str
    heads: int
    groups: int
    key_size: int
    value_size: int
    turned: int | None
    has_sink: bool


def class_of(model_type: str, names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) -> type[PreTrainedModel]:
    """transformers' model of a type, by one of its tables of names: by default the language model.

    Raises:
        ValueError: there is none.
    """
    found = names.get(model_type)
    found = getattr(transformers, found if isinstance(found, str) else found[0], None) if found else None
    if found is None:
        raise ValueError(f"model_type={model_type!r} is not that of a language model of transformers. {ADVICE}")
    return found


def attention_layers(config: PreTrainedConfig, model_type: str | None = None) -> dict[int, AttentionLayer]:
    """The attention layers of a teacher, by number.

    Args:
        config: of the teacher, or of a student of it.
        model_type: of the teacher, where that is not the configuration's.

    Raises:
        ValueError: it cannot be a teacher; says why.
    """
    kind = config.model_type if model_type is None else model_type
    plain = copy.deepcopy(config)
    plain._attn_implementation = None
    plain._experts_implementation = None  # transformers' choice: the "eager" one asks for values, and meta has none
    plain.dtype = None  # a string once a model was saved, which some layers do not read
    for name in ("student", "quantization_config"):
        plain.__dict__.pop(name, None)
    key = kind, plain.to_json_string(use_diff=False)
    if key not in _FOUND:
        _FOUND[key] = _look(kind, plain)
    return _FOUND[key]


_FOUND: dict[tuple[str, str], dict[int, AttentionLayer]] = {}  # by model type and configuration


def _look(model_type: str, config: Any) -> dict[int, AttentionLayer]:
    model_class = class_of(model_type)
    refused = f"model_type={model_type!r} cannot be a teacher: "
    if reason := _why_not(config, model_class):
        raise ValueError(f"{refused}{reason}. {ADVICE}")
    config._attn_implementation = LOOKED_AT
    look, rotaries, reason, is_built = _Look(), [], None, False
    try:
        # on meta, experts are multiplied in bfloat16 alone
        with plain_tensors(), torch.inference_mode(False), torch.device("meta"), _dtype(torch.bfloat16):
            model = model_class(config).eval().requires_grad_(False).base_model
            look.names = {id(module): name for name, module in model.named_modules()}
            if hasattr(model, "rotary_emb"):
                model.rotary_emb.register_forward_hook(look.remember_angles)
            is_built = True
            rotaries = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
            for rotary in rotaries:
                rotary.register_forward_hook(_require_gradient)
                rotary.rope_type = _without_scaling(getattr(rotary, "rope_type", "default"))
            with torch.enable_grad():
                model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False, student=look)
    except _Unheard:
        reason = "its decoder layers hand no keyword arguments on to their attention"
    except Exception as error:  # whatever a model of transformers does that a student does not know
        first = (str(error).splitlines() or [""])[0]
        reason = f"its layers do not run as others do ({type(error).__name__}: {first})"
    if (is_built and not rotaries) or (look.layers and all(layer.turned == 0 for layer in look.layers.values())):
        reason = "its positions are not rotary, and a window cannot go beyond those that it has learned"
    elif not look.layers and reason is None:
        reason = "its attention does not pass transformers' attention interface"
    reason = look.reason or reason
    if reason is not None:
        raise ValueError(f"{refused}{reason}. {ADVICE}")
    return look.layers


def _why_not(config: Any, model_class: Any) -> str | None:
    """What a look at the configuration shows."""
    if config.get_text_config(decoder=True) is not config:
        return "it is of several parts: load its language model alone"
    if config.is_encoder_decoder or not getattr(config, "is_causal", True):
        return "its tokens see the future"
    if getattr(config, "is_heterogeneous", False):
        return "its layers have configurations of their own"
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention: its tokens see the future"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        return "some of its layers have no keys and values of their own"
    if not model_class._can_set_attn_implementation():
        return "its attention does not pass transformers' attention interface"
    if by_length := sorted(_rope_types(config) & set(ROPE_BY_LENGTH)):
        return (
            f"rope_type={by_length[0]!r} turns keys by the length of the text, and those in a cache stay as they are"
        )
    return None


def _rope_types(config: Any) -> set[str]:
    """Of all layers: some configurations have a rule for each kind."""
    rope = getattr(config, "rope_parameters", None) or {}
    rules = [rule for rule in rope.values() if isinstance(rule, dict)] if "rope_type" not in rope else [rope]
    return {rule.get("rope_type", "default") for rule in rules}


class _Unheard(Exception):
    """A keyword argument of the model's forward did not come to its attention."""


class _Look:
    """Stands where a student's forward says what its layers need to know, and sees what comes by."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.layers: dict[int, AttentionLayer] = {}
        self.angles: Any = None
        self.reason: str | None = None

    def remember_angles(self, module: nn.Module, args: Any, output: Any) -> None:
        self.angles = output

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        unknown = [name for name, given in others.items() if given is not None and name not in UNDERSTOOD]
        if unknown:
            self.reason = f"its attention has {', '.join(unknown)}, which a window has not"
        layer = AttentionLayer(
            name=self.names[id(module)],
            heads=query.shape[1],
            groups=key.shape[1],
            key_size=key.shape[3],
            value_size=value.shape[3],
            turned=self._turned(module, key) if key.requires_grad else 0,
            has_sink=others.get("s_aux") is not None,
        )
        if module.layer_idx in self.layers:
            self.reason = "a layer of it attends more than once"
        self.layers[module.layer_idx] = layer  # type: ignore[index]
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    def _turned(self, module: nn.Module, key: torch.Tensor) -> int | None:
        turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if turn is None or not isinstance(self.angles, tuple) or len(self.angles) != 2:
            return None
        for size in (key.shape[3], self.angles[0].shape[-1]):  # some attention layers split their heads themselves
            part = key[..., :size]
            try:
                if turn(part, part, *self.angles)[1].shape == part.shape:
                    return size
            except (RuntimeError, TypeError):
                continue
        return None


def _attend(module: nn.Module, *heads: torch.Tensor, student: _Look | None = None, **others: Any) -> Any:
    if student is None:
        raise _Unheard
    return student.attend(module, *heads, **others)


AttentionInterface.register(LOOKED_AT, _attend)


def _require_gradient(module: nn.Module, args: Any, output: Any) -> Any:
    """Angles that leave a trace in what they turn: nothing else here has a gradient."""
    parts = output if isinstance(output, tuple) else (output,)
    traced = tuple(part.detach().requires_grad_() for part in parts)
    return traced if isinstance(output, tuple) else traced[0]


def let_experts_be_fake(model: PreTrainedModel) -> None:
    """Let a model run on fake tensors: transformers' usual product of experts takes bfloat16 alone there."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")


def _without_scaling(rope_type: Any) -> Any:
    """Rules that ask for the largest position, which has no value here."""
    return dict.fromkeys(rope_type, "default") if isinstance(rope_type, dict) else "default"


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
