"""Which attention layers a teacher needs most."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_hybrid_ssm.upcycle.layer_ranking import LayerRanking, ranking_of
from hf_hybrid_ssm.upcycle.teacher import Teacher


@torch.inference_mode()
def rank_layers_by_sensitivity(
    teacher: Teacher, texts: Sequence[torch.Tensor], progress: Callable[[Sequence[Any]], Any] | None = None
) -> LayerRanking:
    """The layers that see all tokens by how much the loss rises, in nats per token, when their attention adds nothing.

    Args:
        texts: token ids (B, L) each; a few thousand tokens are enough.
        progress: wraps the sequence of layers, as `tqdm` does.
    """
    if not texts:
        raise ValueError("texts is empty: give some token ids.")
    model = teacher.model

    def loss() -> float:
        ids = [text.to(model.device) for text in texts]
        return sum(model(text, labels=text, use_cache=False).loss.item() for text in ids) / len(ids)

    def silent(module: Any, args: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:])

    whole, rises, layers = loss(), {}, teacher.layers
    for layer in layers if progress is None else progress(layers):
        hook = teacher.attention_of(layer).register_forward_hook(silent)
        try:
            rises[layer] = loss() - whole
        finally:
            hook.remove()
    return ranking_of(rises, "sensitivity")
