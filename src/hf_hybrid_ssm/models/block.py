"""What all layers with a recurrent state share: unpad, mix, update the cache or prepare its rollback, repad."""

from typing import Any

import torch
from transformers import Cache

from hf_hybrid_ssm.models.cache import States
from hf_hybrid_ssm.models.unpadding import Unpadding
from hf_hybrid_ssm.ops._core.transforms import is_transforming


class RecurrentMixin:
    """A layer whose states live in `past_key_values.layers[layer_idx]`; it only says how to `mix`."""

    layer_idx: int

    def mix(self, *rows: torch.Tensor, **options: Any) -> tuple[torch.Tensor, States]:
        """Mix rows (B, L, ...) whose real tokens come first; what is in `options` but not listed is the layer's own.

        Args:
            past: the states before the first token, empty before the first forward.
            seq_idx: (B, L) int, documents of packed rows; or None.
            lengths: (B,) int, real tokens at the front of each row; or None.
            return_final_state: also return the states.
            capacity: the tokens that a static cache has room for, for layers that keep all keys; or None.

        Returns:
            (B, L, ...) and the states after the last token, empty if they were not asked for.
        """
        raise NotImplementedError

    def step(
        self, *rows: torch.Tensor, past: States, capacity: int | None, **options: Any
    ) -> tuple[torch.Tensor, States]:
        """`mix` of rows (B, 1, ...) of one token after earlier ones, without gradients.

        It may overwrite the tensors of `past`: nobody asks for them again. A layer overrides it where one token is
        cheaper on its own.
        """
        rest = {"seq_idx": None, "lengths": None, "return_final_state": True}
        return self.mix(*rows, past=past, capacity=capacity, **rest, **options)

    def states_after(self, *rows: torch.Tensor, **options: Any) -> States:
        """The states that `mix` returns, for rollback; a layer overrides it where they are cheaper to compute
        alone."""
        return self.mix(*rows, **options)[1]

    def mix_with_cache(
        self,
        *rows: torch.Tensor,
        unpadding: Unpadding | None = None,
        seq_idx: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """`mix` of rows (B, L, ...) in columns as given, from the cache's states to the cache's states."""
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        is_step = unpadding is None and seq_idx is None and rows[0].shape[1] == 1
        if is_step and cache is not None and cache.states and not torch.is_grad_enabled() and not is_transforming():
            return self._step_with_cache(cache, *rows, **options)
        lengths = None
        if unpadding is not None:
            rows, lengths = tuple(unpadding.unpad(row) for row in rows), unpadding.lengths
            # padding now follows the last document: let it belong there
            seq_idx = None if seq_idx is None else unpadding.unpad(seq_idx).cummax(1).values
        options |= {
            "past": {} if cache is None else cache.states,
            "return_final_state": cache is not None,
            "capacity": getattr(cache, "max_cache_len", None),
        }
        y, states = self.mix(*rows, seq_idx=seq_idx, lengths=lengths, **options)
        if cache is not None:

            def recompute(num_tokens: int) -> States:
                return self.states_after(
                    *(row[:, :num_tokens] for row in rows),
                    seq_idx=None if seq_idx is None else seq_idx[:, :num_tokens],
                    lengths=None if unpadding is None else unpadding.lengths_of_first(num_tokens),
                    **options,
                )

            cache.update_states(rows[0].shape[1], states, recompute)
        return y if unpadding is None else unpadding.repad(y)

    def _step_with_cache(self, cache: Any, *rows: torch.Tensor, **options: Any) -> torch.Tensor:
        """`mix_with_cache` of one token after earlier ones, where no gradient is wanted."""
        options["capacity"] = getattr(cache, "max_cache_len", None)
        if cache.may_overwrite():
            y, states = self.step(*rows, past=cache.states, **options)
            cache.step_states(states)
        else:
            past = {name: state.clone() for name, state in cache.states.items()}
            y, states = self.step(*rows, past=past, **options)
            cache.update_states(1, states, _of_no_token)
        return y


def _of_no_token(num_tokens: int) -> States:
    raise AssertionError("one token is undone by going back to the states before it")
