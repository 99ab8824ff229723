"""One decoded token as a module that holds its states, for `torch.export` and what runs programs without Python.

transformers' modules for that (`transformers.integrations.executorch`) know layers of keys and values alone.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from hf_hybrid_ssm.models.cache import check_finished, fit_cache, is_recurrent_state_layer
from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.ops.core.transforms import is_exporting


class DecodingStep(nn.Module):
    """A language model that reads one token a row at a time, and keeps what came before in its buffers.

    `torch.export.export(step, step.example())` makes one program for every token of every text: it overwrites the
    buffers, and a `position` of 0 begins a new text. Export within `torch.no_grad()`, and within `backend("torch")`,
    without which the kernels of this package stay in the program by name.

    Args:
        model: a causal language model. It is not copied: from then on it is in `eval` mode and its parameters are
            frozen, so that what is computed of them alone (the decays of an S4) is a constant of the program.
        rows: the texts B that are read side by side.
        room: the tokens that layers of full attention keep keys and values for; one more is an error.

    Raises:
        TypeError: the model is an encoder-decoder, or a layer keeps something else than this package's states or the
            keys of all tokens: transformers' windows and recurrences take other branches at other positions.
        ValueError: the model cannot be causal.
    """

    def __init__(self, model: PreTrainedModel, rows: int = 1, room: int = 1024):
        super().__init__()
        if model.config.is_encoder_decoder:
            raise TypeError(f"{type(model).__name__} is an encoder-decoder; DecodingStep takes a causal model.")
        self.rows, self.cache = rows, StaticCache(config=model.config, max_cache_len=room)
        fit_cache(self.cache, model.config)
        for index, layer in enumerate(self.cache.layers):
            if type(layer) is not StaticLayer and not is_recurrent_state_layer(layer):
                kind = type(layer).__name__
                raise TypeError(f"layer {index} keeps a {kind} of transformers, not states or all keys.")
        self.model = model.eval().requires_grad_(False)
        with torch.no_grad():
            model(self.example()[0], **{CACHE: self.cache}, use_cache=True)  # allocates
        self.cache.reset()
        for index, layer in enumerate(self.cache.layers):
            for name, tensor in _tensors(layer).items():
                self.register_buffer(f"{name}_{index}", tensor)

    def __getstate__(self) -> dict[str, Any]:
        self._hold()
        return self.__dict__

    def example(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of `forward`: token 0, at the beginning."""
        zeros = torch.zeros(self.rows, 1, dtype=torch.long, device=self.model.device)
        return zeros, torch.zeros(1, dtype=torch.long, device=self.model.device)

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Logits (B, 1, V) of the next token.

        Args:
            input_ids: (B, 1), the token that comes now.
            position: (1,) int64, how many tokens came before it; 0 forgets those that did.

        Raises:
            RuntimeError: it is exported with gradients, by which a program of a single token is another one.
            ValueError: the last token broke off, and this one goes on from it.
            IndexError: a layer of full attention has no room for it.
        """
        self._hold()
        if is_exporting() and torch.is_grad_enabled():
            raise RuntimeError("DecodingStep is exported within torch.no_grad().")
        if not torch.compiler.is_compiling():
            _begin(self.cache, bool(position > 0))
        goes_on = position > 0
        for layer in self.cache.layers:
            for name, tensor in _tensors(layer).items():
                tensor.copy_(position[0] if name == COUNT else torch.where(goes_on, tensor, 0))
        return self.model(input_ids, **{CACHE: self.cache}, use_cache=True).logits

    def _hold(self) -> None:
        """The layers hold the buffers: those of a program that is made are others than those that they were given."""
        for index, layer in enumerate(self.cache.layers):
            held = {name: getattr(self, f"{name}_{index}") for name in _tensors(layer)}
            if is_recurrent_state_layer(layer):
                layer.states, layer.seen_tokens = {name: held[name] for name in layer.states}, held[COUNT]
            else:
                layer.keys, layer.values, layer.cumulative_length = held["keys"], held["values"], held[COUNT]


COUNT = "seen_tokens"


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    """What a layer of a static cache keeps, by name."""
    if is_recurrent_state_layer(layer):
        return {**layer.states, COUNT: layer.seen_tokens}
    return {"keys": layer.keys, "values": layer.values, COUNT: layer.cumulative_length}


def _begin(cache: StaticCache, goes_on: bool) -> None:
    """What a forward that broke off left behind is refused by a token that goes on, and forgotten by a first one."""
    if goes_on:
        return check_finished(cache)
    cache.reset()
    cache.layers[0].unfinished = False
