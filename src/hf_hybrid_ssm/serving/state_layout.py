"""What a cache holds of one row: found by running the model on a few tokens, so that no family says it twice."""

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.ops.core.dispatch import forced_backend


class State(NamedTuple):
    """One state of one layer: `cache.layers[layer].states[name]` is (B, *shape)."""

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class StateLayout(NamedTuple):
    """The states of all layers, and the layers whose cache grows with every token.

    Those keep the keys and values of all tokens; a state among them has the shape that it has after two tokens.
    """

    states: list[State]
    growing: list[int]


@torch.inference_mode()
def state_layout(model: Any) -> StateLayout:
    """Run a causal model on two tokens, and on one more: a state of fixed size has the same shape after both.

    Args:
        model: in evaluation mode; the states are those of its device and of the kernels that run there.
    """
    decoder = model.get_decoder()
    cache, found = DynamicCache(config=decoder.config), []
    for length in (2, 1):
        ids = torch.zeros(1, length, dtype=torch.int64, device=decoder.device)
        decoder(ids, cache=cache, use_cache=True)
        found.append([_states(layer) for layer in cache.layers])
    first, second = found
    growing = [index for index, (before, after) in enumerate(zip(first, second)) if before is None or before != after]
    states = [State(index, *state) for index, layer in enumerate(first) for state in layer or ()]
    return StateLayout(states, growing)


# by class, configuration, dtype and the backend that is forced
_LAYOUTS: dict[tuple[type, str, torch.dtype, str | None], StateLayout] = {}


def layout_without_running(model: Any) -> StateLayout:
    """As `state_layout`, of the kernels of the CPU and of fake tensors: the model itself is not run."""
    decoder = model.get_decoder()
    key = type(decoder), decoder.config.to_json_string(), decoder.dtype, forced_backend()
    if key not in _LAYOUTS:
        with torch.device("meta"):
            twin = type(decoder)._from_config(decoder.config, dtype=decoder.dtype)
        # constants that modules made before are used as they are
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # kernel caches compare them
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
