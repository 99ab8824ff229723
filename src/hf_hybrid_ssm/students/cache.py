"""The cache layers of students: this package's where there is a window, transformers' elsewhere."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import StaticLayer

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.state_layers import RecurrentStateLayer, StaticRecurrentStateLayer


class WindowedLayer(RecurrentStateLayer):
    """States that the attention function keeps, where transformers' attention layers would append keys and values."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return keys, values

    def offload(self) -> None:
        """They stay where attention is: of one size, and asked for at once."""

    prefetch = offload


class StaticWindowedLayer(StaticRecurrentStateLayer):
    """`WindowedLayer` of a static cache."""

    update = WindowedLayer.update
    offload = prefetch = WindowedLayer.offload


def fit_student_cache(cache: Any, config: Any) -> None:
    """Replace the empty layers of a cache that was made for the teacher where a student keeps other things."""
    if isinstance(cache, DynamicCache) and not cache.layers:
        cache.layers, cache.layer_class_to_replicate = DynamicCache(config=config).layers, None
    layers = getattr(cache, "layers", [])
    for index, (layer, plan) in enumerate(zip(layers, config.plan.layers)):
        if plan.is_own or layer.is_initialized or is_recurrent_state_layer(layer):
            continue
        if isinstance(layer, StaticLayer):
            layers[index] = StaticWindowedLayer(max(each.get_max_length() for each in layers))
        else:
            layers[index] = WindowedLayer()
            layers[index].record_past = any(getattr(each, "record_past", False) for each in layers)
