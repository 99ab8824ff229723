"""What a cache holds of one row: found by running the model on a few tokens, so that no family says it twice."""

import copy
import math
import warnings
from typing import Any, NamedTuple, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer, prepare_cache
from hf_hybrid_ssm.models.packing import States
from hf_hybrid_ssm.models.state_layers import RecurrentStateLayer
from hf_hybrid_ssm.ops.core.dispatch import forced_backend
from hf_hybrid_ssm.ops.core.pages import Attend, PagedState, ServedKeys
from hf_hybrid_ssm.ops.local_attention import AttentionState
from hf_hybrid_ssm.students.teacher import let_experts_be_fake

NAMES = {
    "bias": "add a learned bias by distance to",
    "softcap": "cap the scores of",
    "s_aux": "have sinks of their own in",
}
"""What full attention may have that a server's does not."""


class StateSpec(NamedTuple):
    """One state of one layer: `cache.layers[layer].states[name]` is (B, *shape)."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class FullAttention(NamedTuple):
    """What a server must know of a layer's attention to all tokens so far: the logits are scale · q·k, but for what
    `others` names."""

    layer: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    scale: float
    others: tuple[str, ...] = ()


class StateLayout(NamedTuple):
    """The states of all layers, and the layers whose cache grows with every token.

    Those keep the keys and values of all tokens; a state among them has the shape that it has after two tokens.

    Args:
        states: in the order of the layers.
        growing: numbers of layers.
        attention: of those layers, where they ask a server that keeps keys and values (`PagedLayer`).
    """

    states: list[StateSpec]
    growing: list[int]
    attention: list[FullAttention] = []

    def beside_served(self) -> list[StateSpec]:
        """The states that remain where a server keeps the keys and values of full attention."""
        served = {attention.layer for attention in self.attention}
        return [s for s in self.states if not (s.layer in served and s.name in AttentionState._fields)]


@torch.inference_mode()
def state_layout(model: Any) -> StateLayout:
    """Run a causal model on two tokens, and on one more: a state of fixed size has the same shape after both.

    Args:
        model: in evaluation mode; the states are those of its device and of the kernels that run there.
    """
    decoder = model.get_decoder()
    cache, layouts = prepare_cache(None, decoder.config, 1), []
    for length in (2, 1):
        ids = torch.zeros(1, length, dtype=torch.int64, device=decoder.device)
        decoder(ids, cache=cache, use_cache=True)
        layouts.append([_states(layer) for layer in cache.layers])
    first, second = layouts
    growing = [index for index, (before, after) in enumerate(zip(first, second)) if before is None or before != after]
    states = [StateSpec(index, *state) for index, layer in enumerate(first) for state in layer or ()]
    return StateLayout(states, growing, _full_attention(decoder, growing) if growing else [])


class PagedLayer(RecurrentStateLayer):
    """The states of B texts among those of a server, for one forward."""

    states: Any  # a `PagedState` or `ServedKeys` stands in the place of a tensor
    pages: torch.Tensor
    served: ServedKeys | None = None

    @classmethod
    def from_pages(
        cls,
        pages: torch.Tensor,
        states: States,
        *,
        attend: Attend | None = None,
        in_place: bool = False,
        holds_states: bool = True,
    ) -> Self:
        """
        Args:
            pages: (B,) int64, the page of each text.
            states: name → tensor (B, ...), which a step may overwrite; or, `in_place`, the server's memory of P pages
                (P, ...), in which a mixer with `takes_pages` updates them by a step.
            attend: the server's attention, where its KV cache has this layer's keys.
            holds_states: the layer is one of this package's, and not transformers' own full attention.
        """
        layer = cls()
        layer.pages, layer.holds_states = pages, holds_states
        if in_place:
            layer.states = {name: PagedState(memory, pages) for name, memory in states.items()}
        elif attend is not None:
            layer.served = ServedKeys(attend)
            layer.states = {**states, "keys": layer.served}
        layer.seen_tokens = 1  # one column stands for all that went before
        layer.is_initialized = True
        layer.device = pages.device
        return layer

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The next tokens' alone: the server has the others."""
        return keys, values

    def may_be_overwritten(self) -> bool:
        return True

    @property
    def batch_size(self) -> int:
        return self.pages.shape[0]


def serve_layer(cache: Cache, index: int, attend: Attend, states: States, pages: torch.Tensor) -> None:
    """Let layer `index` of a cache ask a server that keeps its keys and values.

    Args:
        states: the layer's other states, name → tensor (B, ...).
        pages: (B,) int64, the page of each text.
    """
    layer = cache.layers[index]
    if not isinstance(layer, LinearAttentionCacheLayerMixin):  # a teacher's convolution or recurrence keeps no keys
        holds_states = is_recurrent_state_layer(layer)
        cache.layers[index] = PagedLayer.from_pages(pages, states, attend=attend, holds_states=holds_states)


def _full_attention(decoder: Any, growing: list[int]) -> list[FullAttention]:
    """What the `growing` layers ask a server for, by asking one that only takes notes."""
    cache, layouts = prepare_cache(None, decoder.config, 1), []

    def notes(layer: int) -> Attend:
        def attend(queries, keys, values, *, scale, **others):
            found = [NAMES[name] for name, given in others.items() if given is not None]
            found += ["have values of another size than keys in"] if values.shape != keys.shape else []
            layouts.append(FullAttention(layer, queries.shape[1], keys.shape[1], keys.shape[3], scale, tuple(found)))
            return queries.new_zeros(*queries.shape[:3], values.shape[3]).transpose(1, 2).flatten(2)

        return attend

    ids = torch.zeros(1, 2, dtype=torch.int64, device=decoder.device)
    for index in growing:
        serve_layer(cache, index, notes(index), {}, ids[0, :1])
    decoder(ids, cache=cache, use_cache=True)
    return layouts


# by class, configuration, dtype and the backend that is forced
_LAYOUTS: dict[tuple[type, str, torch.dtype, str | None], StateLayout] = {}


def layout_without_running(model: Any) -> StateLayout:
    """As `state_layout`, of the kernels of the CPU and of fake tensors: the model itself is not run."""
    decoder = model.get_decoder()
    key = type(decoder), decoder.config.to_json_string(), decoder.dtype, forced_backend()
    if key not in _LAYOUTS:
        with torch.device("meta"):
            twin = type(decoder)._from_config(copy.deepcopy(decoder.config), dtype=decoder.dtype)
        # constants that modules made before are used as they are
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # kernel caches compare them
            let_experts_be_fake(twin)
            _LAYOUTS[key] = state_layout(twin.to_empty(device="cpu").eval())
    return _LAYOUTS[key]


def growing_layers(model: Any) -> list[int]:
    """The layers of a model whose cache grows with every token; the model itself is not run."""
    return layout_without_running(model).growing


def _states(layer: Any) -> list[tuple[str, tuple[int, ...], torch.dtype]] | None:
    """Of one row; None where the layer is one of transformers' own, for full attention."""
    if not is_recurrent_state_layer(layer):
        return None
    return [(name, tuple(state.shape[1:]), state.dtype) for name, state in layer.states.items()]
