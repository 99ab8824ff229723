"""Tensor-parallel plans that name what a model has.

A configuration's plan covers every layer that its family can have; one model has some of them.
"""

import re

from torch import nn

LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class MatchingPlans:
    """Leaves out of `tp_plan` the rules that name no linear map or embedding of this model; placed before
    `PreTrainedModel`."""

    _tp_plan: dict[str, str] | None

    def init_parallel_plans(self) -> None:
        super().init_parallel_plans()  # type: ignore[misc]
        names = {
            LAYER_NUMBER.sub("*", name)
            for name, module in self.named_modules()  # type: ignore[attr-defined]
            if isinstance(module, (nn.Linear, nn.Embedding))
        }
        self._tp_plan = {rule: style for rule, style in (self._tp_plan or {}).items() if rule in names}
