"""Which attention layers a model needs most."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def attention_sensitivity(teacher: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> list[float]:
    """How much the loss rises, in nats per token, when the attention of a layer adds nothing; by layer.

    The layers with the largest values are those to `keep`.

    Args:
        batches: `input_ids` (B, L) and optionally `attention_mask`; a few thousand tokens are enough to rank layers.
    """
    texts = [dict(batch) for batch in batches]
    if not texts:
        raise ValueError("batches is empty: give some text to measure with.")

    def loss() -> float:
        total = 0.0
        for batch in texts:
            total += teacher(**batch, labels=batch["input_ids"], use_cache=False).loss.item()
        return total / len(texts)

    def silent(module, args, output):
        return (torch.zeros_like(output[0]), *output[1:])

    whole = loss()
    rises = []
    for layer in teacher.model.layers:
        hook = layer.self_attn.register_forward_hook(silent)
        try:
            rises.append(loss() - whole)
        finally:
            hook.remove()
    return rises
