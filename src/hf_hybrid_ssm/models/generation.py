"""`generate` of models whose layers keep states: one mixin, placed before `GenerationMixin`.

Keys and values of padding can be hidden later by a mask; what a state has read stays in it. So where the cache
outlives `generate` (it was given, or is returned), the attention mask says 0 for the padding that transformers appends
to finished rows, and their states do not change. While no row has ended nothing changes, and where the cache is thrown
away nothing needs to.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Cache, GenerationConfig, GenerationMixin, StoppingCriteriaList

from hf_hybrid_ssm.models.cache import fit_cache, has_forgotten, let_assistant_forget
from hf_hybrid_ssm.models.configuration import HOOKS, STATE_LAYER_TYPE
from hf_hybrid_ssm.models.outputs import CACHE, OLD, by_both_cache_names, take_cache, with_both_names

# what `generate` needs itself, and hands on to every step as well
OF_GENERATE = ("tokenizer", "assistant_tokenizer", "assistant_model", "streamer")
ADDS_FULL_MASKS = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 18)
"""Beside a mask of ones, positions that restart say nothing of documents; later versions drop such a mask."""


if TYPE_CHECKING:
    from transformers import GenerationMixin as _Mixed  # what the mixin stands before
else:
    _Mixed = object


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
    """One running `generate`; `reads_padding` once its next tokens are padding in some rows. `known` tokens at the
    beginning of an assisted one are in its cache."""

    cache_was_given: bool
    rows: RowsThatEnd | None = None
    reads_padding: bool = False
    known: int = 0


_CALL: ContextVar[_Call | None] = ContextVar("the innermost running generate", default=None)


def reads_padding() -> bool:
    """Whether the next tokens of the running `generate` are padding in rows that have ended, and its mask says so."""
    call = _CALL.get()
    return call is not None and call.reads_padding


class HybridGenerationMixin(_Mixed):
    """`generate` by both names of the cache, from the states of earlier texts, with a mask of ended rows."""

    config: Any
    continues_texts = True
    """A prompt is the beginning of the text that it generates, and not the source of another."""

    @wraps(GenerationMixin.generate)
    def generate(self, *args: Any, prefix_cache: Any = None, **kwargs: Any) -> Any:
        """As in transformers.

        Args:
            prefix_cache (`hf_hybrid_ssm.serving.PrefixCache`, *optional*): states of earlier texts. The longest that
                this one begins with is continued; those of this text are added.

        Raises:
            ValueError: `seq_idx` or `cu_seq_lens_q` is given.
        """
        if HOOKS.generate is not None and self.continues_texts:
            return HOOKS.generate(self, self._generate, prefix_cache, args, kwargs)
        if hasattr(prefix_cache, "generate") and self.continues_texts:  # of the package, given to exported code
            return prefix_cache.generate(self, self._generate, args, kwargs)
        if prefix_cache is not None:
            kwargs["prefix_cache"] = prefix_cache  # which transformers refuses by its name
        return self._generate(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        for name in ("seq_idx", "cu_seq_lens_q"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} says nothing of the tokens to come: `generate` reads packed rows by position_ids that "
                    "begin anew with each document."
                )
        cache = take_cache(kwargs)
        token = _CALL.set(_Call(cache is not None))
        try:
            return with_both_names(super().generate(*args, **kwargs | ({} if cache is None else {CACHE: cache})))
        finally:
            _CALL.reset(token)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """As in transformers; of `hf_hybrid_ssm.compiled_decoding` a program that is kept."""
        compiled = super().get_compiled_call(compile_config)
        if hasattr(compile_config, "kept_or_renewed"):
            return compile_config.kept_or_renewed(self, compiled)
        return compiled

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
        """As in transformers. No step after the first begins a document, whose positions then need no look; nor does
        its mask, while all rows go on.

        The cache is there by the old name as well: PEFT looks for it, and begins every step with its virtual tokens
        where it finds none.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in OF_GENERATE}
        call = _CALL.get()
        if call is not None and call.known and is_first_iteration and next_sequence_length is None:
            next_sequence_length = input_ids.shape[1] - call.known
        options = {CACHE: cache, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds, **kwargs}
        options |= {"next_sequence_length": next_sequence_length, "is_first_iteration": is_first_iteration}
        inputs = super().prepare_inputs_for_generation(input_ids, **options)
        inputs |= {OLD: inputs[CACHE]} if CACHE in inputs else {}
        if self.continues_texts:
            inputs["continues_documents"] = not is_first_iteration and not reads_padding()
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers; an assistant's cache may forget, and then a new one takes its place."""
        if generation_config.is_assistant and has_forgotten(model_kwargs.get(CACHE)):
            del model_kwargs[CACHE]
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if (cache := model_kwargs.get(CACHE)) is not None:
            fit_cache(cache, self.config)
            if generation_config.is_assistant:
                let_assistant_forget(cache)
                cache.activate_past_recording()

    @wraps(GenerationMixin._assisted_decoding)  # transformers looks at its signature
    def _assisted_decoding(self, input_ids: torch.LongTensor, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which reads the whole text again where a given cache holds its beginning.

        Raises:
            ValueError: the whole text was not given, where drafts are looked for, or nothing beyond the cache; or
                states of each token are asked for, which transformers cuts as if all of the text had been read.
        """
        cache, call = kwargs.get(CACHE), _CALL.get()
        known = 0 if cache is None else int(cache.get_seq_length())
        if known and call is not None:
            mask = kwargs.get("decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask")
            options = kwargs["generation_config"]
            dropped = getattr(options, "_mask_length", None)  # of a mask that hid nothing
            columns = dropped if mask is None else mask.shape[1]
            if not known < input_ids.shape[1] or columns not in (None, input_ids.shape[1]):
                raise ValueError(
                    f"assisted generation from a cache of {known} tokens needs input_ids of the whole text and at "
                    f"least one more token, got {input_ids.shape[1]} tokens."
                )
            if options.return_dict_in_generate and (options.output_hidden_states or options.output_attentions):
                raise ValueError(
                    "assisted generation from a cache that was given returns no hidden states and attentions."
                )
            call.known = known
        return super()._assisted_decoding(input_ids, *args, **kwargs)

    def _prepare_attention_mask_for_generation(self, inputs: Any, generation_config: Any, model_kwargs: dict) -> Any:
        """No mask where it would hide nothing and positions restart; called where the caller gave none.

        Raises:
            ValueError: the cache already holds tokens, which versions before 5.18 find by the mask.
        """
        mask = super()._prepare_attention_mask_for_generation(inputs, generation_config, model_kwargs)
        positions = model_kwargs.get("position_ids") if ADDS_FULL_MASKS else None
        if positions is None or bool((positions.diff() == 1).all()) or not bool((mask == 1).all()):
            return mask
        cache = model_kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"generate of transformers {transformers.__version__} cannot go on from a cache with "
                "position_ids that restart: install transformers>=5.18."
            )
        return None

    def create_masks_for_generate(
        self, config: Any, inputs_embeds: Any, attention_mask: Any, *, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """Masks made ahead of compiled decoding; a generated token is padding only in rows that have ended.

        transformers' `create_recurrent_attention_mask` does not serve: it drops the columns of earlier tokens, and so
        where their padding was, and ignores masks that it does not understand.
        """
        if inputs_embeds.shape[1] == 1 and not is_first_iteration and attention_mask is not None:
            attention_mask = attention_mask[:, -1:] if reads_padding() else None  # of one shape at every step
        return {STATE_LAYER_TYPE: attention_mask}

    def _get_stopping_criteria(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; remembers ended rows where they get padding and the cache outlives the call."""
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)
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
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        call = _CALL.get()
        if call is None or call.rows is None or (ended := call.rows.ended) is None:
            return model_kwargs
        call.reads_padding = True
        name = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
        mask = model_kwargs.get(name)
        if mask is None:
            columns = int(model_kwargs[CACHE].get_seq_length()) + 1
            mask = torch.ones(len(ended), columns, dtype=torch.long, device=ended.device)
        model_kwargs[name] = torch.cat([mask[:, :-1], (~ended).to(mask).unsqueeze(1)], 1)
        return model_kwargs

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            ValueError: its paged cache holds keys and values of single tokens.
        """
        raise ValueError(
            f"{type(self).__name__} has no continuous batching (generate_batch): its paged cache holds the keys and "
            "values of single tokens, and this model's layers keep states. Call generate with a left-padded batch and "
            "its attention_mask, which gives the same text as each prompt alone."
        )

    continuous_batching_context_manager = generate_batch

    @property
    def init_continuous_batching(self) -> Any:
        """`transformers serve` asks for it, and generates request by request where it is missing."""
        raise AttributeError
