"""Parallel plans that name what a model has.

A configuration's plan covers every layer that its family can have; one model has some of them.
"""

import re

import torch
from torch import nn

from hf_hybrid_ssm.layers.float32_parameters import Float32ParametersMixin

LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
NARROW = (torch.bfloat16, torch.float16)


class MatchingPlans:
    """Makes the plans of a configuration those of this model; placed before `PreTrainedModel`.

    `tp_plan` and `fsdp_plan` lose the rules that match nothing here. `fsdp_plan` gains rules where the weights are
    narrower than float32: FSDP2 shards units of one dtype, so what shares a module with parameters that stay float32
    becomes units of its own. (transformers makes a unit of each module that holds such parameters.)
    """

    _tp_plan: dict[str, str] | None
    _fsdp_plan: dict[str, str] | None

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()  # type: ignore[misc]
        modules = [(LAYER_NUMBER.sub("*", name), module) for name, module in self.named_modules()]  # type: ignore[attr-defined]
        linear = {name for name, module in modules if isinstance(module, (nn.Linear, nn.Embedding))}
        self._tp_plan = _matching(self._tp_plan, linear)
        self._fsdp_plan = _matching(self._fsdp_plan, {name for name, _ in modules})
        if self.dtype in NARROW:  # type: ignore[attr-defined]
            for name, module in modules:
                self._fsdp_plan |= dict.fromkeys(_beside_float32(name, module), "free_full_weight")


def _matching(plan: dict[str, str] | None, names: set[str]) -> dict[str, str]:
    return {rule: style for rule, style in (plan or {}).items() if rule in names}


def _beside_float32(name: str, module: nn.Module) -> list[str]:
    """The children with parameters of a module that keeps some of its own parameters in float32."""
    if not isinstance(module, Float32ParametersMixin):
        return []
    if all(module._parameters.get(kept) is None for kept in module.float32_parameters):
        return []
    return [f"{name}.{child}" for child, part in module.named_children() if any(True for _ in part.parameters())]
