"""Outputs of teachers' models, whose cache is found by both names (see `hf_hybrid_ssm.models.cache_names`)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)

from hf_hybrid_ssm.models.cache_names import BaseModelOutputWithCache, CacheByBothNames, CausalLMOutputWithCache


@dataclass
class MoeModelOutputWithCache(CacheByBothNames, MoeModelOutputWithPast):
    """transformers' `MoeModelOutputWithPast`, whose cache has both names."""


@dataclass
class MoeCausalLMOutputWithCache(CacheByBothNames, MoeCausalLMOutputWithPast):
    """transformers' `MoeCausalLMOutputWithPast`, whose cache has both names."""


OUTPUTS: dict[type, type] = {
    BaseModelOutputWithPast: BaseModelOutputWithCache,
    CausalLMOutputWithPast: CausalLMOutputWithCache,
    MoeModelOutputWithPast: MoeModelOutputWithCache,
    MoeCausalLMOutputWithPast: MoeCausalLMOutputWithCache,
}


def by_both_names(output: Any) -> Any:
    """An output of a teacher, whose cache has both names."""
    kind = OUTPUTS.get(type(output))
    return output if kind is None else kind(**{part.name: getattr(output, part.name) for part in fields(output)})


def logits_of(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Logits (B, N, V) of last hidden states (B, N, d), by the model's own head and what its forward does around it.

    Args:
        model: a language model of transformers.
    """
    base = model.base_model
    held = vars(base).get("forward")  # hooks of other libraries put theirs there
    base.forward = lambda *args, **kwargs: MoeModelOutputWithCache(last_hidden_state=states)
    try:
        ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        return model(input_ids=ids, use_cache=False).logits
    finally:
        del base.forward
        if held is not None:
            base.forward = held


def with_both_names(forward: Callable) -> Callable:
    """A forward that gives such outputs."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return by_both_names(forward(*args, **kwargs))

    return call
