"""A teacher some of whose layers see a window: through its attention masks, without a student and without training.

Query i of a windowed layer sees key j if i - W <= j <= i, as in a student, and the first `sinks` tokens: pretrained
attention rests on the first token, and loses far more without it than what lies beyond the window is worth.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from hf_hybrid_ssm.models.cache_names import CACHE
from hf_hybrid_ssm.upcycle.teacher import Teacher

MASKABLE = ("eager", "sdpa")
"""Implementations of attention that take any mask."""


def window_mask(length: int, window: int, sinks: int = 1, device: Any = None, first: int = 0) -> torch.Tensor:
    """Which of `length` keys each query from the position `first` on sees, bool (L - first, L): itself, the `window`
    tokens before, the first `sinks`."""
    position = torch.arange(length, device=device)
    distance = position[first:, None] - position
    return (distance >= 0) & ((distance <= window) | (position < sinks))


def windowed_groups(
    mask: torch.Tensor, groups: Collection[int], heads: int, kv_heads: int, others: torch.Tensor | None = None
) -> torch.Tensor:
    """The mask (T, L) of the last T queries for the heads of some key/value groups, `others` (all of the past, by
    default) for the rest: bool (H, T, L)."""
    is_windowed = torch.tensor([head // (heads // kv_heads) in groups for head in range(heads)], device=mask.device)
    others = torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0]) if others is None else others
    return torch.where(is_windowed[:, None, None], mask, others)


@contextmanager
def maskable(teacher: Teacher) -> Iterator[None]:
    """While it lasts, attention that takes any mask, and no dropout."""
    model = teacher.model
    implementation, training = model.config._attn_implementation, model.training
    if implementation not in MASKABLE:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    model.eval()
    try:
        yield
    finally:
        if implementation not in MASKABLE:
            model.set_attn_implementation(implementation)
        model.train(training)


@contextmanager
def windowed_layers(teacher: Teacher, layers: Collection[int], window: int, sinks: int = 1) -> Iterator[None]:
    """While it lasts, these layers of a teacher see a window and the first `sinks` tokens.

    Texts are read whole, padded on the right at most: after a cache that holds tokens the teacher raises a ValueError.
    """

    def windowed(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache, x = kwargs.get(CACHE), args[0] if args else kwargs["hidden_states"]
        if cache is not None and cache.get_seq_length(module.layer_idx):
            raise ValueError("a teacher with windowed layers reads whole texts: it cannot go on from a cache.")
        mask = window_mask(x.shape[1], window, sinks, x.device)
        return args, kwargs | {"attention_mask": _scores_mask(kwargs.get("attention_mask"), mask, x.dtype)}

    with maskable(teacher):
        chosen = [teacher.attention_of(index) for index in layers]
        hooks = [module.register_forward_pre_hook(windowed, with_kwargs=True) for module in chosen]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class ReadText(DynamicCache):
    """Keys and values of a text that is read; what follows it sees them, and leaves nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        return torch.cat([layer.keys, key_states], dim=-2), torch.cat([layer.values, value_states], dim=-2)

    @classmethod
    def in_windows(cls, teacher: Teacher, input_ids: torch.Tensor, window: int) -> "ReadText":
        """What a teacher leaves that reads a text (B, S) with windows in all layers; within `maskable`."""
        cache = DynamicCache()
        with windowed_layers(teacher, teacher.layers, window):
            teacher.model.base_model(input_ids=input_ids, use_cache=True, **{CACHE: cache})
        past = cls()
        past.layers = cache.layers
        return past


class LayerReplay:
    """A forward of a teacher that can be run again with other masks, from the first layer on whose mask is another.

    Args:
        teacher: within `maskable`.
        input_ids: (1, L), without padding.
        masks: of the runs that others are compared with, as of `hidden_states`.
        past: what the tokens follow; none of it changes.
    """

    def __init__(
        self,
        teacher: Teacher,
        input_ids: torch.Tensor,
        masks: Mapping[int, torch.Tensor] | None = None,
        past: "ReadText | None" = None,
    ):
        self.teacher, self.length = teacher, input_ids.shape[1]
        self._layers = teacher.decoder_layers
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._inputs: list[torch.Tensor] = []
        self._masks: Mapping[int, torch.Tensor] = {}
        base, last = teacher.model.base_model, self._layers[-1]

        def remember(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._inputs.append(args[0] if args else kwargs["hidden_states"])
            self._given.append((args[1:], rest))

        def look_for_norm(module: Any, args: tuple[Any, ...]) -> None:
            if args and args[0] is self._last:
                self._norm = module

        def remember_last(module: Any, args: tuple[Any, ...], output: Any) -> None:
            self._last = _hidden(output)

        self._last: torch.Tensor | None = None
        hooks = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in self._layers]
        hooks.append(last.register_forward_hook(remember_last))
        hooks += [module.register_forward_pre_hook(look_for_norm) for module in base.children()]
        try:
            options = {"use_cache": False} if past is None else {"use_cache": True, CACHE: past}
            self.teachers_own = base(input_ids=input_ids, **options).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        self._last = None
        self.base = self.teachers_own
        if masks:
            self.compare_with(masks)

    def compare_with(self, masks: Mapping[int, torch.Tensor]) -> None:
        """Other masks for the runs that others are compared with: `base` are the hidden states with them."""
        self._inputs, self.base = self._run(masks)
        self._masks = masks

    def hidden_states(self, masks: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The last hidden states, normalised, (B, L, d).

        Args:
            masks: layer → the keys that its queries see, bool (L, L), or (H, L, L) where heads differ; layers that it
                does not name see what the teacher's do.
        """
        return self._run(masks)[1]

    def _run(self, masks: Mapping[int, torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The inputs of all layers and the last hidden states."""
        layers = self._layers
        changed = [index for index in range(len(layers)) if masks.get(index) is not self._masks.get(index)]
        if not changed:
            return self._inputs, self.base
        inputs = self._inputs[: changed[0]]
        x = self._inputs[changed[0]]
        for index in range(changed[0], len(layers)):
            inputs.append(x)
            args, kwargs = self._given[index]
            if index in masks:
                kwargs = kwargs | {"attention_mask": _scores_mask(kwargs.get("attention_mask"), masks[index], x.dtype)}
            x = _hidden(layers[index](x, *args, **kwargs))
        return inputs, self._norm(x)


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _scores_mask(own: torch.Tensor | None, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of a layer, (B or 1, H or 1, L, L), from its own mask (None: causal) and `seen`."""
    lowest = torch.finfo(dtype).min
    seen = seen.expand(1, -1, -1, -1) if seen.dim() == 3 else seen[None, None]
    if own is not None and own.dtype != torch.bool:
        return own.masked_fill(~seen.to(own.device), lowest)
    both = seen if own is None else own & seen.to(own.device)
    return torch.zeros((), dtype=dtype, device=both.device).masked_fill(~both, lowest)
