"""States that go on from one segment of a long text to the next in training."""

import torch
from transformers import Cache

from hf_hybrid_ssm.models.cache import is_recurrent_state_layer
from hf_hybrid_ssm.models.packing import with_zero_rows


def carry_segment(cache: Cache, begins: torch.Tensor) -> None:
    """Make a cache, in place, the one that the next segment of every row starts from.

    No gradient goes back through it, and rows whose next segment begins a document start from zero.

    Args:
        cache: what a forward with `use_cache=True` returned.
        begins: (B,) bool.

    Raises:
        ValueError: a layer keeps keys and values of all tokens (full attention), which cannot reset a single row; or
            `begins` has another shape or dtype.
    """
    for index, layer in enumerate(cache.layers):
        if not is_recurrent_state_layer(layer):
            raise ValueError(
                f"layer {index} of cache is a {type(layer).__name__}; only layers with a state of fixed "
                "size can carry it from segment to segment."
            )
        if begins.dtype != torch.bool or begins.shape != (layer.batch_size,):
            raise ValueError(
                f"begins must be bool of shape (batch,) = ({layer.batch_size},), got {begins.dtype} of shape "
                f"{tuple(begins.shape)}."
            )
        # zero is the state before the first token in every family
        layer.map_states(lambda state: with_zero_rows(state.detach(), begins))
