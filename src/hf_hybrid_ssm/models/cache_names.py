"""The cache's two names: `cache`, as transformers calls it from 5.24 on, and `past_key_values`, as it did before.

Every model takes and gives both, whatever the version. transformers finds the argument by its name: in signatures, in
dicts of arguments and outputs, and in gradient checkpointing, which takes it out of a layer's arguments.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import torch
import transformers
from transformers import Cache, GenerationConfig, GenerationMixin
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutputWithPast,
)

from hf_hybrid_ssm.models.cache import has_forgotten, let_assistant_forget

NEW, OLD = "cache", "past_key_values"
CACHE = NEW if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24) else OLD
"""The name that the installed transformers uses."""


def take_cache(arguments: dict[str, Any], first: Any = None) -> Any:
    """The cache among named arguments, by whichever name, which leaves them; `first` is one given by position.

    Raises:
        ValueError: there are two, and not the same one twice.
    """
    caches = [cache for cache in (first, arguments.pop(NEW, None), arguments.pop(OLD, None)) if cache is not None]
    if any(cache is not caches[0] for cache in caches):
        raise ValueError(f"{NEW} and {OLD} are two names of one argument, and both were given: give {NEW} alone.")
    return caches[0] if caches else None


def as_transformers_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same named arguments, the cache by the name that the installed transformers uses."""
    cache = take_cache(arguments)
    return arguments if cache is None else arguments | {CACHE: cache}


def by_both_cache_names(function: Callable) -> Callable:
    """A function with a parameter of one of the names takes it by the other too; one with neither stays as it is.

    Its signature shows the name that the installed transformers looks for.
    """
    signature = inspect.signature(function)
    own = next((name for name in (NEW, OLD) if name in signature.parameters), None)
    if own is None:
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


class CacheByBothNames:
    """An output whose cache is found by both names, as attribute and as key."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_field(key))  # type: ignore[misc]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_field(key))  # type: ignore[misc]

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_field(key), default)  # type: ignore[misc]


def _field(key: Any) -> Any:
    return CACHE if isinstance(key, str) and key in (NEW, OLD) else key


# the name that the field does not have
setattr(CacheByBothNames, OLD if CACHE == NEW else NEW, property(lambda output: getattr(output, CACHE)))


@dataclass
class BaseModelOutputWithCache(CacheByBothNames, BaseModelOutputWithPast):
    """transformers' `BaseModelOutputWithPast`, whose cache has both names."""


@dataclass
class CausalLMOutputWithCache(CacheByBothNames, CausalLMOutputWithPast):
    """transformers' `CausalLMOutputWithPast`, whose cache has both names."""


@dataclass
class SequenceClassifierOutputWithCache(CacheByBothNames, SequenceClassifierOutputWithPast):
    """transformers' `SequenceClassifierOutputWithPast`, whose cache has both names."""


@dataclass
class Seq2SeqModelOutputWithCache(CacheByBothNames, Seq2SeqModelOutput):
    """transformers' `Seq2SeqModelOutput`, whose cache has both names."""


@dataclass
class Seq2SeqLMOutputWithCache(CacheByBothNames, Seq2SeqLMOutput):
    """transformers' `Seq2SeqLMOutput`, whose cache has both names."""


@dataclass
class DecoderOnlyOutputWithCache(CacheByBothNames, GenerateDecoderOnlyOutput):
    """transformers' `GenerateDecoderOnlyOutput`, whose cache has both names."""


@dataclass
class EncoderDecoderOutputWithCache(CacheByBothNames, GenerateEncoderDecoderOutput):
    """transformers' `GenerateEncoderDecoderOutput`, whose cache has both names."""


@dataclass
class BeamDecoderOnlyOutputWithCache(CacheByBothNames, GenerateBeamDecoderOnlyOutput):
    """transformers' `GenerateBeamDecoderOnlyOutput`, whose cache has both names."""


@dataclass
class BeamEncoderDecoderOutputWithCache(CacheByBothNames, GenerateBeamEncoderDecoderOutput):
    """transformers' `GenerateBeamEncoderDecoderOutput`, whose cache has both names."""


GENERATED: dict[type, type] = {
    GenerateDecoderOnlyOutput: DecoderOnlyOutputWithCache,
    GenerateEncoderDecoderOutput: EncoderDecoderOutputWithCache,
    GenerateBeamDecoderOnlyOutput: BeamDecoderOnlyOutputWithCache,
    GenerateBeamEncoderDecoderOutput: BeamEncoderDecoderOutputWithCache,
}


# what `generate` needs itself, and hands on to every step as well
OF_GENERATE = ("tokenizer", "assistant_tokenizer", "assistant_model", "streamer")


class GenerationByBothCacheNames:
    """`generate` and what it calls; placed before `GenerationMixin`."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = super().generate(*args, **as_transformers_names(kwargs))  # type: ignore[misc]
        kind = GENERATED.get(type(output))
        return output if kind is None else kind(**{part.name: getattr(output, part.name) for part in fields(output)})

    @by_both_cache_names
    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; and what the model wants to know besides (`_inputs_of_iteration`).

        The cache is there by the old name as well: PEFT looks for it, and begins every step with its virtual tokens
        where it finds none.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_GENERATE}
        options = {CACHE: cache, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        options |= {"next_sequence_length": next_sequence_length, "is_first_iteration": is_first_iteration}
        inputs = super().prepare_inputs_for_generation(input_ids, **options)  # type: ignore[misc]
        inputs |= {OLD: inputs[CACHE]} if CACHE in inputs else {}
        return inputs | self._inputs_of_iteration(bool(is_first_iteration))

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers; an assistant's cache may forget, and then a new one takes its place."""
        if generation_config.is_assistant and has_forgotten(model_kwargs.get(CACHE)):
            del model_kwargs[CACHE]
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        if generation_config.is_assistant and CACHE in model_kwargs:
            let_assistant_forget(model_kwargs[CACHE])

    def _inputs_of_iteration(self, is_first_iteration: bool) -> dict[str, Any]:
        """Arguments of the forward that transformers does not know."""
        return {}
