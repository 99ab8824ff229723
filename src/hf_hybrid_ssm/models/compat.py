"""What transformers lacks: older versions, down to 5.16, or fake tensors."""

from typing import Any

import torch
import transformers

from hf_hybrid_ssm.models.cache_names import CACHE


def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The tokens of (B, L, D) whose logits are wanted; transformers has this function from 5.21 on.

    Args:
        logits_to_keep: the last so many, 0 for all; or indices, of all rows (K,) or of each (B, K); or a mask (B, L),
            which gives (tokens, D).
    """
    if isinstance(logits_to_keep, int):
        return hidden_states[:, -logits_to_keep:] if logits_to_keep else hidden_states
    if logits_to_keep.dim() == 1:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep.unsqueeze(-1), 1)


ADDS_FULL_MASKS = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 18)


class PackedGeneration:
    """`generate` with positions that restart: before 5.18 it adds a mask of ones, beside which positions say nothing
    of documents. Later versions drop such a mask.
    """

    def _prepare_attention_mask_for_generation(self, inputs: Any, generation_config: Any, model_kwargs: dict) -> Any:
        """No mask where it would hide nothing and positions restart; called where the caller gave none.

        Raises:
            ValueError: the cache already holds tokens, which these versions find by the mask.
        """
        mask = super()._prepare_attention_mask_for_generation(inputs, generation_config, model_kwargs)  # type: ignore[misc]
        positions = model_kwargs.get("position_ids") if ADDS_FULL_MASKS else None
        if positions is None or bool((positions.diff() == 1).all()) or not bool((mask == 1).all()):
            return mask
        cache = model_kwargs.get(CACHE)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"generate of transformers {transformers.__version__} cannot go on from a cache with "
                "position_ids that restart: install transformers>=5.18."
            )
        return None


def let_experts_be_fake(model: transformers.PreTrainedModel) -> None:
    """Let a model run on fake tensors: transformers' usual product of experts takes bfloat16 alone there."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
