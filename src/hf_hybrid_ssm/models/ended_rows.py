"""Mask the padding that `generate` appends to finished rows, so that their states do not change.

Keys and values of padding can be hidden later by a mask; what a state has read stays in it. So where the cache
outlives `generate` (it was given, or is returned), the attention mask says 0 for the tokens of ended rows. While no
row has ended nothing changes, and where the cache is thrown away nothing needs to.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList

from hf_hybrid_ssm.models.cache_names import CACHE, NEW, OLD, GenerationByBothCacheNames


class RowsThatEnd(StoppingCriteriaList):
    """The criteria of one `generate`, which remember the rows that they have ended."""

    ended: torch.Tensor | None = None
    """(B,) bool; None as long as no row has ended."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = super().__call__(input_ids, scores, **kwargs)
        if self.ended is not None:
            self.ended = self.ended | done
        elif len(done) > 1 and bool(done.any()):  # transformers reads the same next
            self.ended = done
        return done


@dataclass
class _Call:
    """One running `generate`; `reads_padding` once its next tokens are padding in some rows."""

    cache_was_given: bool
    rows: RowsThatEnd | None = None
    reads_padding: bool = False


_CALL: ContextVar[_Call | None] = ContextVar("the innermost running generate", default=None)


def reads_padding() -> bool:
    """Whether the next tokens of the running `generate` are padding in rows that have ended, and its mask says so."""
    call = _CALL.get()
    return call is not None and call.reads_padding


class GenerationOfRowsThatEnd(GenerationByBothCacheNames):
    """`generate`, whose mask hides what it feeds to ended rows; placed before `GenerationMixin`."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        token = _CALL.set(_Call(any(kwargs.get(name) is not None for name in (NEW, OLD))))
        try:
            return super().generate(*args, **kwargs)
        finally:
            _CALL.reset(token)

    def _get_stopping_criteria(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; remembers ended rows where they get padding and the cache outlives the call."""
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)  # type: ignore[misc]
        call = _CALL.get()
        if call is None or not (call.cache_was_given or generation_config.return_dict_in_generate):
            return criteria
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        if not pads or (generation_config.num_beams or 1) > 1:  # the cache of beams is not that of what is returned
            return criteria
        call.rows = RowsThatEnd(criteria)
        return call.rows

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers, but the column of the next token is 0 in ended rows."""
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        call = _CALL.get()
        if call is None or call.rows is None or (ended := call.rows.ended) is None:
            return model_kwargs
        call.reads_padding = True
        name = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"  # type: ignore[attr-defined]
        mask = model_kwargs.get(name)
        if mask is None:
            columns = int(model_kwargs[CACHE].get_seq_length()) + 1
            mask = torch.ones(len(ended), columns, dtype=torch.long, device=ended.device)
        model_kwargs[name] = torch.cat([mask[:, :-1], (~ended).to(mask).unsqueeze(1)], 1)
        return model_kwargs
