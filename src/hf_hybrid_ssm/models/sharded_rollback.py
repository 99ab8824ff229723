"""Going back in a cache (`crop`) whose model is in shards of FSDP2.

A rollback recomputes states outside of any `forward`, around which FSDP gathers the weights. So while the past is
recorded, each layer of the cache is told which units hold its weights, and gathers them itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers import Cache

from hf_hybrid_ssm.models.packing import PackedRows, States

Recompute = Callable[[PackedRows], States]


def remember_units(cache: Cache, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Tell the layers of a cache that records its past how to gather the weights of the model's blocks, if they are
    in shards."""
    if not any(getattr(layer, "record_past", False) for layer in cache.layers):
        return
    units = [module for module in model.modules() if hasattr(module, "unshard")]
    if not units:
        return
    for layer, block in zip(cache.layers, blocks):
        parts = set(block.modules())
        layer.gathering = _gathering([unit for unit in units if unit in parts or block in set(unit.modules())])


def _gathering(units: list[Any]) -> Callable[[Recompute, PackedRows], States]:
    def run(recompute: Recompute, first: PackedRows) -> States:
        for unit in units:
            unit.unshard()
        try:
            return recompute(first)
        finally:
            for unit in units:
                unit.reshard()

    return run
