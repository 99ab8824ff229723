"""What all layers with a recurrent state share: unpad, mix, update the cache or prepare its rollback, repad."""

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import Cache

from hf_hybrid_ssm.models.cache import state_layer
from hf_hybrid_ssm.models.packing import PackedRows, States, packed_rows
from hf_hybrid_ssm.ops.core.rows import Rows


class _Recomputed:
    """The states of a layer after the first tokens of an earlier forward. A copy of a cache that holds this has the
    same layer: weights are no part of a cache."""

    def __init__(self, layer: "RecurrentMixin", inputs: tuple[torch.Tensor, ...], states: States, options: Any):
        self.layer, self.read = layer, (inputs, states, options)

    def __call__(self, first: PackedRows) -> States:
        return self.layer._recompute(*self.read, first)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Recomputed":
        return _Recomputed(self.layer, *copy.deepcopy(self.read, memo))


class RecurrentMixin:
    """A layer whose states live in `cache.layers[layer_idx]`; it only says how to `forward_rows`."""

    layer_idx: int
    takes_pages = False
    """Whether each of the states in `past` may be a `PagedState`, for one token (`PagedLayer` of serving)."""

    def forward_rows(self, *inputs: Any, **options: Any) -> tuple[torch.Tensor, States]:
        """Mix rows (B, L, ...) whose real tokens come first; `options` are the layer's own.

        Args:
            past: the states before the first token, empty before the first forward.
            rows: how they are read. Where `rows.is_step`, ops take their kernels for one token.

        Returns:
            (B, L, ...) and the states after the last token, empty if they were not asked for.
        """
        raise NotImplementedError

    def states_after(self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        """The states that `forward_rows` returns, for rollback; a layer overrides it where they are cheaper to compute
        alone."""
        return self.forward_rows(*inputs, past=past, rows=rows, **options)[1]

    def forward_with_cache(
        self, *inputs: torch.Tensor, rows: PackedRows | None = None, cache: Cache | None = None, **options: Any
    ) -> torch.Tensor:
        """`forward_rows` of (B, L, ...) in columns as given, from the cache's states to the cache's states."""
        rows = packed_rows(length=inputs[0].shape[1]) if rows is None else rows
        layer = None if cache is None else state_layer(cache, self.layer_idx)
        if rows.return_final_state != (layer is not None):  # a layer that is called alone
            room = None if layer is None else layer.max_cache_len
            rows = replace(rows, return_final_state=layer is not None, capacity=room)
        states: States = {} if layer is None else layer.states_before()
        if rows.padding is not None:
            inputs = tuple(rows.unpad(x) for x in inputs)
        if layer is not None and rows.overwrites_states:
            layer.is_torn = True  # until the states after this token are all there
        past = states if rows.starts_new_document is None else rows.continued(states)
        y, states_after = self.forward_rows(*inputs, past=past, rows=rows, **options)
        if layer is not None:
            layer.update_states(rows, states_after, _Recomputed(self, inputs, states, options))
        return y if rows.padding is None else rows.repad(y)

    def _recompute(
        self, inputs: tuple[torch.Tensor, ...], states: States, options: dict[str, Any], first: PackedRows
    ) -> States:
        """The states after the `first` tokens of an earlier forward, outside of any."""
        hook = getattr(self, "_hf_hook", None)  # of accelerate, which brings offloaded parameters in for a forward
        if hook is not None:
            hook.pre_forward(self)
        tokens = (x[:, : first.length] for x in inputs)
        states = self.states_after(*tokens, past=first.continued(states), rows=first, **options)
        if hook is not None:
            hook.post_forward(self, None)
        return states
