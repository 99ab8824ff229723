"""What all layers with a recurrent state share: unpad, mix, update the cache or prepare its rollback, repad."""

from dataclasses import replace
from typing import Any

import torch
from transformers import Cache

from hf_hybrid_ssm.models.cache import RecurrentStateLayer, state_layer
from hf_hybrid_ssm.models.cache_names import by_both_cache_names
from hf_hybrid_ssm.models.packing import PackedRows, States, packed_rows
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.core.transforms import is_transforming


class RecurrentMixin:
    """A layer whose states live in `cache.layers[layer_idx]`; it only says how to `forward_rows`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A layer may call the cache either way in its `forward`."""
        if "forward" in vars(cls):
            cls.forward = by_both_cache_names(cls.forward)  # type: ignore[attr-defined]
        super().__init_subclass__(**kwargs)

    layer_idx: int
    steps_on_pages = False
    """Whether `step` takes `pages`: `past` is then memory of many texts (see `RecurrentStateLayer.hold_pages`)."""

    def forward_rows(
        self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """Mix rows (B, L, ...) whose real tokens come first; `options` are the layer's own.

        Args:
            past: the states before the first token, empty before the first forward.
            rows: how they are read.

        Returns:
            (B, L, ...) and the states after the last token, empty if they were not asked for.
        """
        raise NotImplementedError

    def step(self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any) -> tuple[torch.Tensor, States]:
        """`forward_rows` of rows (B, 1, ...) of one token after earlier ones, without gradients.

        It may overwrite the tensors of `past`: nobody asks for them again. A layer overrides it where one token is
        cheaper on its own.
        """
        return self.forward_rows(*inputs, past=past, rows=rows, **options)

    def states_after(self, *inputs: torch.Tensor, past: States, rows: Rows, **options: Any) -> States:
        """The states that `forward_rows` returns, for rollback; a layer overrides it where they are cheaper to compute
        alone."""
        return self.forward_rows(*inputs, past=past, rows=rows, **options)[1]

    @by_both_cache_names
    def forward_with_cache(
        self,
        *inputs: torch.Tensor,
        rows: PackedRows | None = None,
        cache: Cache | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """`forward_rows` of (B, L, ...) in columns as given, from the cache's states to the cache's states."""
        rows = packed_rows(length=inputs[0].shape[1]) if rows is None else rows
        layer = None if cache is None else state_layer(cache, self.layer_idx)
        if rows.return_final_state != (layer is not None):  # a layer that is called alone
            room = None if layer is None else layer.max_cache_len
            rows = replace(rows, return_final_state=layer is not None, capacity=room)
        states: States = {} if layer is None else layer.states
        if layer is not None and states and rows.is_step and not torch.is_grad_enabled() and not is_transforming():
            return self._step_with_cache(layer, rows, *inputs, **options)
        inputs = tuple(rows.unpad(x) for x in inputs)
        y, states_after = self.forward_rows(*inputs, past=rows.continued(states), rows=rows, **options)
        if layer is not None:

            def recompute(first: PackedRows) -> States:
                tokens = (x[:, : first.length] for x in inputs)
                return self.states_after(*tokens, past=first.continued(states), rows=first, **options)

            layer.update_states(rows, states_after, recompute)
        return rows.repad(y)

    def _step_with_cache(
        self, layer: RecurrentStateLayer, rows: PackedRows, *inputs: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """`forward_with_cache` of one token after earlier ones, where no gradient is wanted."""
        if layer.pages is not None:
            layer.begin_step()
            y, states = self.step(*inputs, past=layer.states, rows=rows, pages=layer.pages, **options)
            layer.step_states(rows, states)
            return y
        past = rows.continued(layer.states)
        if layer.can_update_in_place():
            layer.begin_step()
            y, states = self.step(*inputs, past=past, rows=rows, **options)
            layer.step_states(rows, states)
        else:
            past = {name: state.clone() for name, state in past.items()}
            y, states = self.step(*inputs, past=past, rows=rows, **options)
            layer.update_states(rows, states)
        return y
