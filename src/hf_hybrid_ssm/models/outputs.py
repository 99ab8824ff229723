"""The cache's two names, `cache` (of transformers from 5.24 on) and `past_key_values` (before), and outputs with both.

A model takes and gives both, whatever the version: `by_both_cache_names` wraps the forwards that a user calls, and
within them the cache is called `cache`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, TypeVar

import transformers
from transformers import generation
from transformers import modeling_outputs as modeling
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import ModelOutput

Output = TypeVar("Output")
NEW, OLD = "cache", "past_key_values"
CACHE = NEW if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24) else OLD
"""The name that the installed transformers uses."""


class ShiftedLabelsMixin:
    """A model whose labels are those of the next token.

    `Trainer` shifts smoothed labels where a table of transformers has the name of the class, which is therefore put
    there: a folder's own code, a subclass, and what FSDP2 makes of a class have names that it does not know.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (config_class := getattr(cls, "config_class", None)) is not None:
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(config_class.model_type, cls.__name__)
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__


def take_cache(arguments: dict[str, Any], first: Any = None) -> Any:
    """The cache among named arguments, by whichever name, which leaves them; `first` is one given by position.

    Raises:
        ValueError: there are two, and not the same one twice.
    """
    caches = [cache for cache in (first, arguments.pop(NEW, None), arguments.pop(OLD, None)) if cache is not None]
    if any(cache is not caches[0] for cache in caches):
        raise ValueError(f"{NEW} and {OLD} are two names of one argument, and both were given: give {NEW} alone.")
    return caches[0] if caches else None


def by_both_cache_names(function: Callable) -> Callable:
    """A function with a parameter of one of the names takes it by the other too.

    Its signature shows the name that the installed transformers looks for.
    """
    signature = inspect.signature(function)
    own = next((name for name in (NEW, OLD) if name in signature.parameters), None)
    if own is None:  # of a teacher that keeps no cache
        return function
    other, place = OLD if own == NEW else NEW, list(signature.parameters).index(own)

    @wraps(function)
    def taking_both(*args: Any, **kwargs: Any) -> Any:
        if "kwargs" in kwargs:  # transformers' pipelines hand on as one argument what a forward was given besides
            kwargs |= kwargs.pop("kwargs")
        if other in kwargs:
            cache = take_cache(kwargs, args[place] if len(args) > place else None)
            if len(args) > place:
                args = (*args[:place], cache, *args[place + 1 :])
            else:
                kwargs[own] = cache
        return function(*args, **kwargs)

    shown = [part.replace(name=CACHE) if part.name == own else part for part in signature.parameters.values()]
    taking_both.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return taking_both


class CacheByBothNames(ModelOutput):
    """An output whose cache is found by both names, as attribute and as key."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_field(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_field(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_field(key), default)


def _field(key: Any) -> Any:
    return CACHE if isinstance(key, str) and key in (NEW, OLD) else key


# the name that the field does not have
setattr(CacheByBothNames, OLD if CACHE == NEW else NEW, property(lambda output: getattr(output, CACHE)))

WITH_BOTH: dict[type, type] = {}
"""Outputs of transformers → the same with both names."""


def _with_both(name: str, kind: type[Output]) -> type[Output]:
    members = {"__module__": __name__, "__doc__": f"transformers' `{kind.__name__}`, whose cache has both names."}
    WITH_BOTH[kind] = dataclass(type(name, (CacheByBothNames, kind), members))
    return WITH_BOTH[kind]


# by their own names here, for which pickles ask
BaseModelOutputWithCache = _with_both("BaseModelOutputWithCache", modeling.BaseModelOutputWithPast)
CausalLMOutputWithCache = _with_both("CausalLMOutputWithCache", modeling.CausalLMOutputWithPast)
MoeModelOutputWithCache = _with_both("MoeModelOutputWithCache", modeling.MoeModelOutputWithPast)
MoeCausalLMOutputWithCache = _with_both("MoeCausalLMOutputWithCache", modeling.MoeCausalLMOutputWithPast)
SequenceClassifierWithCache = _with_both("SequenceClassifierWithCache", modeling.SequenceClassifierOutputWithPast)
Seq2SeqModelOutputWithCache = _with_both("Seq2SeqModelOutputWithCache", modeling.Seq2SeqModelOutput)
Seq2SeqLMOutputWithCache = _with_both("Seq2SeqLMOutputWithCache", modeling.Seq2SeqLMOutput)
DecoderOnlyWithCache = _with_both("DecoderOnlyWithCache", generation.GenerateDecoderOnlyOutput)
EncoderDecoderWithCache = _with_both("EncoderDecoderWithCache", generation.GenerateEncoderDecoderOutput)
BeamDecoderOnlyWithCache = _with_both("BeamDecoderOnlyWithCache", generation.GenerateBeamDecoderOnlyOutput)
BeamEncoderDecoderWithCache = _with_both("BeamEncoderDecoderWithCache", generation.GenerateBeamEncoderDecoderOutput)


def with_both_names(output: Any) -> Any:
    """An output of transformers, whose cache has both names; anything else as it is."""
    kind = WITH_BOTH.get(type(output))
    return output if kind is None else kind(**{part.name: getattr(output, part.name) for part in fields(output)})
