"""What the layers of a student have to know of one forward; one keyword argument brings it down to them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_hybrid_ssm.models.cache import served_keys
from hf_hybrid_ssm.models.columns import ColumnRows, held_attention
from hf_hybrid_ssm.ops.core.checks import can_read_values
from hf_hybrid_ssm.ops.core.rows import moved
from hf_hybrid_ssm.students.configuration import PREFIX
from hf_hybrid_ssm.students.sinks import Angles


@dataclass(eq=False)
class Ranks:
    """(B or 1, L) int64, the tokens before each token in its document, of rows whose real tokens come first."""

    values: torch.Tensor
    _without: dict[int, Any] = field(default_factory=dict, repr=False)

    def without_sink(self, left: int) -> Any:
        """Which tokens still see the first of their document in a window of that many before each, and so have no
        sink: True for all, False for none, or (B or 1, L) bool."""
        if left not in self._without:
            self._without[left] = self._which(left)
        return self._without[left]

    def _which(self, left: int) -> Any:
        if torch.is_grad_enabled() or not can_read_values(self.values):
            return self.values <= left
        least, most = (int(limit) for limit in torch.aminmax(self.values))
        return True if most <= left else False if least > left else self.values <= left


@dataclass(eq=False)
class Beside:
    """A memory beside the attention of a layer, what it reads (B, L, ...), and what it gives (B, L, d)."""

    memory: Any
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor | None = None


@dataclass(eq=False)
class Forward:
    """What the layers have to know of one forward of a student; one keyword argument brings it down to them.

    Args:
        rows: as they are read.
        cache: of this forward, or None.
        query_scale: (B or 1, L) float32, of queries that see all tokens; None: 1.
        ranks: of the tokens, where windows have sinks.
        angles: (layer type, W) → of the places W + 1 tokens before each token, for constant sinks.
        sink_keys: layer → a constant sink's keys (B, G, 1, e) there, where one token is read.
        layer_input: (B, L, d), within a layer whose memory reads it.
        beside: of the layer that is called.
    """

    rows: ColumnRows
    cache: Cache | None = None
    query_scale: torch.Tensor | None = None
    ranks: Ranks | None = None
    angles: dict[tuple[Any, int], Angles] = field(default_factory=dict)
    sink_keys: dict[int, torch.Tensor] = field(default_factory=dict)
    layer_input: torch.Tensor | None = None
    beside: Beside | None = None
    _own_document: torch.Tensor | None = field(default=None, repr=False)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Forward":
        """accelerate asks this of what a layer on another device is called with."""

        def move(x: Any) -> Any:
            return None if x is None else x.to(device, non_blocking=non_blocking)

        return replace(
            self,
            rows=moved(self.rows, device, non_blocking),
            query_scale=move(self.query_scale),
            ranks=None if self.ranks is None else Ranks(move(self.ranks.values)),
            angles={place: (move(cos), move(sin)) for place, (cos, sin) in self.angles.items()},
            sink_keys={},
            _own_document=None,
        )

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As transformers' attention functions: (B, heads, L, e) each → (B, L, heads, e) and weights, if any."""
        windowed = module.__dict__.get("windowed")
        if windowed is not None:
            return windowed.attend(module, query, key, value, self, **options), None
        query = self.scaled(query, value.dtype)
        if self.cache is not None and (served := served_keys(self.cache, module.layer_idx)) is not None:
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            more = {name: options.get(name) for name in ("softcap", "s_aux")}
            return served.attend(query, key, value, scale=scale, **more).unflatten(2, (query.shape[1], -1)), None
        mask = self.within_documents(mask, query, key)
        held = held_attention(own_name(module), self.rows, query, key, value, mask, **options)
        return own_attention(module)(module, query, key, value, mask, **options) if held is None else (held, None)

    def scaled(self, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(B, H, L, e) queries that see all tokens, sharper the more these are."""
        return query if self.query_scale is None else (query * self.query_scale[:, None, :, None]).to(dtype)

    def within_documents(
        self, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        """The mask (B or 1, 1, L, T) of attention to all tokens, where a row packs documents: only to its own.

        Raises:
            ValueError: the attention that was chosen takes no such mask.
        """
        starts, past = self.rows.starts, self.rows.past
        if starts is None:
            return mask
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 4):
            raise ValueError("packed rows need attn_implementation='sdpa' or 'eager' where layers see all tokens.")
        if self._own_document is None or self._own_document.shape[-1] != key.shape[2]:
            columns = torch.arange(key.shape[2], device=key.device)
            before = columns <= (torch.arange(query.shape[2], device=key.device) + past).unsqueeze(1)
            self._own_document = (before & (columns >= starts.unsqueeze(2))).unsqueeze(1)
        own = self._own_document
        if mask is None:
            return own
        return mask & own if mask.dtype == torch.bool else mask.masked_fill(~own, torch.finfo(mask.dtype).min)


def own_attention(module: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The teacher's attention, by the implementation that was chosen for it."""
    name = own_name(module)
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def own_name(module: Any) -> str:
    """Of the implementation of the teacher's attention that was chosen."""
    return module.config._attn_implementation.removeprefix(PREFIX)
