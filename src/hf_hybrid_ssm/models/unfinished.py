"""A cache that an error or an interrupt left half updated, its layers at different tokens, must not be reused.

A forward marks its cache before the first layer and takes the mark away after the last: two attributes of Python, and
no operation. Only a cache that bears the mark is looked at, by the next call.
"""

import torch
from transformers import Cache


def begin_forward(cache: Cache | None) -> None:
    """Mark a cache before its layers read more tokens."""
    if cache is not None and cache.layers and not torch.compiler.is_compiling():
        cache.layers[0].unfinished = True


def finish_forward(cache: Cache | None) -> None:
    """Take the mark away: all layers have read the same tokens."""
    if cache is not None and cache.layers and not torch.compiler.is_compiling():
        cache.layers[0].unfinished = False


def check_finished(cache: Cache) -> None:
    """
    Raises:
        ValueError: the last forward broke off, and the layers disagree about the tokens that they have read, or one of
            them was being overwritten.
    """
    layers = cache.layers
    if not layers or torch.compiler.is_compiling() or not getattr(layers[0], "unfinished", False):
        return
    counts = [int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")]
    if len(set(counts)) > 1 or any(getattr(layer, "is_torn", False) for layer in layers):
        raise ValueError(
            "cache is half advanced: the last forward with it broke off (an error or an interrupt), and its "
            f"layers have read {counts} tokens. Read the text again with a new cache, or go on with a copy that was "
            "made before (copy.deepcopy)."
        )
