"""What one call of `generate` asks for, and why a cache of prefixes cannot serve some calls."""

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from hf_hybrid_ssm.models.outputs import NEW, OLD
from hf_hybrid_ssm.serving.model_identity import unknown_code

SIGNATURE = inspect.signature(GenerationMixin.generate)
# values that say nothing; any other one is refused
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "token_healing": (None, False),
    "custom_generate": (None,),
    "assistant_model": (None,),
}
# what is returned of every token of the prompt, most of which are not read
OF_ALL_TOKENS = ("output_hidden_states", "output_attentions")
FORBIDDEN = {NEW, OLD, "inputs_embeds", "position_ids"}
# the tokenizer is for stop strings, and transformers' server always gives it
KNOWN = {"input_ids", "attention_mask", "tokenizer"}


class Request:
    """The named arguments of one call; `ids` (1, L) int64, or None where the call gives no tokens."""

    def __init__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        arguments = dict(SIGNATURE.bind(model, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.update(arguments.pop("kwargs", {}))
        self.model, self.arguments = model, arguments
        named = arguments.get("input_ids")
        self.ids = arguments.get("inputs") if named is None else named

    def value(self, name: str) -> Any:
        """Of an option: what the call says, else its configuration, else the model's."""
        places = (self.arguments.get("generation_config"), self.model.generation_config)
        values = (self.arguments.get(name), *(getattr(place, name, None) for place in places))
        return next((value for value in values if value is not None), None)

    def why_not(self) -> str | None:
        """Why states of prefixes cannot serve this call; None where they can."""
        for name, served in SUPPORTED.items():
            if self.value(name) not in served:
                return f"{name}={_shown(self.value(name))} does not go with it: leave one of them out"
        usual = GenerationConfig()
        for name, value in self.arguments.items():
            is_usual = name in SIGNATURE.parameters or name in KNOWN or hasattr(usual, name)
            if value is not None and (name in FORBIDDEN or not is_usual):
                return f"{name} does not go with it: states belong to token ids alone"
        if _prepends_virtual_tokens(self.model):
            return "the active adapter begins every text with virtual tokens: use one that changes weights (LoRA)"
        return self._why_not_ids()

    def why_aside(self) -> str | None:
        """Why this call is to read its whole text, though it could be served; None if it need not."""
        for name in OF_ALL_TOKENS:
            if self.value(name):
                return f"{name}=True is of all tokens"
        if any(module.training for module in self.model.get_decoder().modules()):
            return "the model is in training mode, whose states may be random: call model.eval()"
        if (code := unknown_code(self.model)) is not None:
            return f"{code} may change states, and states do not show it"
        return None

    def _why_not_ids(self) -> str | None:
        if not isinstance(self.ids, torch.Tensor) or self.ids.dim() != 2 or self.ids.shape[1] == 0:
            return "there are no input_ids of shape (1, length) with at least one token"
        if self.ids.shape[0] != 1:
            return f"input_ids has {self.ids.shape[0]} rows, and it serves one: call generate for each row"
        mask = self.arguments.get("attention_mask")
        if mask is None and self._is_taken_for_padding():
            return (
                f"input_ids holds pad_token_id={self.value('pad_token_id')}, which generate takes for padding "
                "where no attention_mask is given: give one, of ones"
            )
        if mask is not None and (mask.shape != self.ids.shape or not bool((mask == 1).all())):
            return "attention_mask must be all ones, of the shape of input_ids: give the text without padding"
        return None

    def _is_taken_for_padding(self) -> bool:
        pad, end = self.value("pad_token_id"), self.value("eos_token_id")
        ends = end if isinstance(end, list | tuple) else [end]
        return pad is not None and pad not in ends and bool((self.ids == pad).any())


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float | list | bool) else type(value).__name__


def _prepends_virtual_tokens(model: Any) -> bool:
    """PEFT's prompt tuning and its like put its own method in the place of the model's."""
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    return bool(getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False))
