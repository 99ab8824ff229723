"""Loss by position in a text of any length, read in pieces with a cache."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.models.outputs import CACHE


@torch.inference_mode()
def loss_by_position(model: Any, input_ids: torch.Tensor, piece: int = 512) -> torch.Tensor:
    """The loss of every token but the first, in nats: float32 (B, L - 1), on the CPU.

    The text is read once, `piece` tokens at a time. Beside the model's cache, which a window or a state bounds, memory
    does not grow with the length. A text of one piece is read without a cache.

    Args:
        model: a causal language model.
        input_ids: (B, L) without padding.

    Raises:
        ValueError: there are fewer than two tokens, or pieces are empty.
    """
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)} must be (B, L) with at least two tokens.")
    if piece < 1:
        raise ValueError(f"piece={piece} must be at least 1.")
    training, cache = model.training, None
    losses = []
    model.eval()
    try:
        for start in range(0, input_ids.shape[1] - 1, piece):
            tokens = input_ids[:, start : start + piece].to(model.device)
            wanted = input_ids[:, start + 1 : start + 1 + piece].to(model.device)
            goes_on = start + piece < input_ids.shape[1] - 1
            output = model(tokens, use_cache=goes_on or cache is not None, **{CACHE: cache})
            cache = output[CACHE] if goes_on else None
            logits = output.logits[:, : wanted.shape[1]].float()
            losses.append(F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").cpu())
    finally:
        model.train(training)
    return torch.cat(losses, dim=1)


def mean_by_position(losses: torch.Tensor, edges: Sequence[int]) -> dict[str, float]:
    """Mean loss of the tokens at positions from one edge to the next, "256-512": 256 tokens and more came before.

    Args:
        losses: of `loss_by_position`; position t is in column t - 1.
        edges: ascending, the last at most L.

    Raises:
        ValueError: the text does not reach the last edge.
    """
    if list(edges) != sorted(set(edges)) or len(edges) < 2 or edges[0] < 1:
        raise ValueError(f"edges={list(edges)} must be two or more ascending positions from 1 on.")
    if edges[-1] > losses.shape[1] + 1:
        raise ValueError(f"edges={list(edges)} go beyond the {losses.shape[1] + 1} tokens of the text.")
    return {f"{low}-{high}": float(losses[:, low - 1 : high - 1].double().mean()) for low, high in pairwise(edges)}
