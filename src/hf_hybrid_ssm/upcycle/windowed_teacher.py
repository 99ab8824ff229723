"""A teacher some of whose layers see a window: through its attention masks, without a student and without training.

Query i of a windowed layer sees key j if i - W <= j <= i, as in a student, and the first `sinks` tokens: pretrained
attention rests on the first token, and loses far more without it than what lies beyond the window is worth.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from hf_hybrid_ssm.models.outputs import CACHE
from hf_hybrid_ssm.upcycle.teacher import Teacher

PIECE = 512
"""Tokens of a text that are read at once in windows: each sees few others."""
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


class ReadText(DynamicCache):
    """Keys and values of a text that is read; what follows it sees them, and leaves nothing.

    Attributes:
        columns: layer → those of its tokens that are seen, where that is not all of them.
    """

    columns: Mapping[int, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, columns = self.layers[layer_idx], self.columns.get(layer_idx)
        before = layer.keys, layer.values
        keys, values = before if columns is None else (x.index_select(-2, columns) for x in before)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)

    @classmethod
    def in_windows(cls, teacher: Teacher, input_ids: torch.Tensor, window: int) -> "ReadText":
        """What a teacher leaves that reads a text (B, S) with windows in all layers; within `maskable`."""
        cache = _InWindows(teacher.layers, window)
        with ExitStack() as hooks:
            for index in teacher.layers:
                attention = teacher.attention_of(index)
                hooks.enter_context(attention.register_forward_pre_hook(cache.mask, with_kwargs=True))
            for piece in input_ids.split(PIECE, 1):
                teacher.model.base_model(input_ids=piece, use_cache=True, **{CACHE: cache})
        past = cls()
        past.layers = cache.layers
        return past


class _InWindows(DynamicCache):
    """Keeps all keys and values of a text that is read piece by piece, and shows some layers a window of them and the
    first token."""

    def __init__(self, windowed: Collection[int], window: int):
        super().__init__()
        self.windowed, self.window = windowed, window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.windowed or before <= self.window + 1:
            return keys, values
        shown = (torch.cat([x[..., :1, :], x[..., before - self.window :, :]], -2) for x in (keys, values))
        return next(shown), next(shown)

    def mask(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the attention of a layer with a window: what its tokens see of those keys."""
        x, before = args[0] if args else kwargs["hidden_states"], self.get_seq_length(module.layer_idx)
        seen = window_mask(before + x.shape[1], self.window, device=x.device, first=before)
        if before > self.window + 1:
            seen = torch.cat([seen[:, :1], seen[:, before - self.window :]], 1)
        return args, kwargs | {"attention_mask": _scores_mask(None, seen, x.dtype)}


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
        self.teacher, self.length, self._past = teacher, input_ids.shape[1], past
        self._layers = teacher.decoder_layers
        self._given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._inputs: list[torch.Tensor] = []
        self._masks: Mapping[int, torch.Tensor] = {}
        base = teacher.model.base_model

        def remember(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._inputs.append(args[0] if args else kwargs["hidden_states"])
            self._given.append((args[1:], rest))

        outputs: list[torch.Tensor] = []  # of the last layer; what reads it is the last norm

        def look_for_norm(module: Any, args: tuple[Any, ...]) -> None:
            if outputs and args and args[0] is outputs[0]:
                self._norm = module

        def remember_last(module: Any, args: tuple[Any, ...], output: Any) -> None:
            outputs.append(_hidden(output))

        options = {"use_cache": False} if past is None else {"use_cache": True, CACHE: past}
        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.enter_context(layer.register_forward_pre_hook(remember, with_kwargs=True))
            hooks.enter_context(self._layers[-1].register_forward_hook(remember_last))
            for module in base.children():
                hooks.enter_context(module.register_forward_pre_hook(look_for_norm))
            self.teachers_own = base(input_ids=input_ids, **options).last_hidden_state
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

    def together(self, several: Sequence[Mapping[int, torch.Tensor]]) -> torch.Tensor:
        """`hidden_states` of several masks, (n, L, d): after a text as one row, in which each run sees its own tokens
        alone, since a matrix is read once for all of them."""
        if self._past is None or len(several) == 1:
            return torch.cat([self.hidden_states(masks) for masks in several])
        starts = [self._first_changed(masks) for masks in several]
        order = sorted(range(len(several)), key=lambda run: starts[run])
        running: list[int] = []
        x = self.base[:, :0]
        for index in range(min(starts), len(self._layers)):
            begun = [run for run in order if starts[run] == index]
            running += begun
            x = torch.cat([x, *[self._inputs[index]] * len(begun)], 1)
            args, kwargs = _repeated(self._given[index], self.length, len(running))
            seen = [several[run].get(index) for run in running]
            kwargs["attention_mask"] = self._mask_of_runs(self._past, index, seen, x.dtype)
            x = _hidden(self._layers[index](x, *args, **kwargs))
        self._past.columns = {}
        states = self._norm(x).unflatten(1, (-1, self.length))[0] if running else self.base[:0]
        found = dict(zip(running, states))
        return torch.stack([found.get(run, self.base[0]) for run in range(len(several))])

    def _first_changed(self, masks: Mapping[int, torch.Tensor]) -> int:
        """The first layer whose mask is another than in the runs that others are compared with."""
        count = len(self._layers)
        return next((index for index in range(count) if masks.get(index) is not self._masks.get(index)), count)

    def _mask_of_runs(
        self, past: ReadText, index: int, seen: list[torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor:
        """What is added to the scores of a layer, (1, H or 1, n L, S + n L), of runs that see so much each; of the S
        tokens of the text those that none sees are left out."""
        own, length, device = self._given[index][1].get("attention_mask"), self.length, self.base.device
        before, lowest = past.layers[index].keys.shape[-2], torch.finfo(dtype).min
        causal = window_mask(before + length, before + length, device=device, first=before)
        made = {id(each): _scores_mask(own, causal if each is None else each, dtype) for each in seen}
        is_seen = torch.stack([(mask[..., :before] > lowest).flatten(0, 2).any(0) for mask in made.values()]).any(0)
        columns = is_seen.nonzero()[:, 0]
        past.columns = {index: columns}
        heads = max(mask.shape[1] for mask in made.values())
        shape = (1, heads, len(seen) * length, len(columns) + len(seen) * length)
        whole = torch.full(shape, lowest, dtype=dtype, device=device)
        for run, each in enumerate(seen):
            rows, start = whole[:, :, run * length : (run + 1) * length], len(columns) + run * length
            rows[..., : len(columns)] = made[id(each)][..., columns]
            rows[..., start : start + length] = made[id(each)][..., before:]
        return whole

    def _run(self, masks: Mapping[int, torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The inputs of all layers and the last hidden states."""
        layers, first = self._layers, self._first_changed(masks)
        if first == len(layers):
            return self._inputs, self.base
        inputs, x = self._inputs[:first], self._inputs[first]
        for index in range(first, len(layers)):
            inputs.append(x)
            args, kwargs = self._given[index]
            if index in masks:
                kwargs = kwargs | {"attention_mask": _scores_mask(kwargs.get("attention_mask"), masks[index], x.dtype)}
            x = _hidden(layers[index](x, *args, **kwargs))
        return inputs, self._norm(x)


def _repeated(given: Any, length: int, count: int) -> Any:
    """Arguments of a layer for as many runs in one row: what has a place for each of `length` tokens comes again."""
    if isinstance(given, dict):
        return {name: _repeated(value, length, count) for name, value in given.items()}
    if isinstance(given, tuple | list):
        return tuple(_repeated(value, length, count) for value in given)
    if not isinstance(given, torch.Tensor) or length not in given.shape[:2]:
        return given
    return torch.cat([given] * count, min(1, given.dim() - 1))


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
