"""Losses of the heads that classify: a sum over targets divided by their number, in this batch or in all of a step.

With gradient accumulation transformers' `Trainer` counts the targets of all micro-batches (labels that are not -100),
passes that `num_items_in_batch` to the forward, and then divides by nothing more: a loss that ignored it would grow
with the number of micro-batches.
"""

from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.models.inputs import problem_type_of

Count: TypeAlias = torch.Tensor | int | None


def sequence_classification_loss(
    labels: torch.Tensor, pooled_logits: torch.Tensor, config: Any, num_items_in_batch: Count = None, **kwargs: Any
) -> torch.Tensor:
    """Cross-entropy of classes, squared error of values, or binary cross-entropy of several labels, whichever
    `config.problem_type` says; None there is replaced by what the labels look like, as in transformers.

    Args:
        labels: (B,) class indices, -100 to ignore a row; or (B,) or (B, C) values.
        pooled_logits: (B, C).
        num_items_in_batch: what the sum is divided by, elements of `labels` that are not -100; by default this
            batch's.
    """
    config.problem_type = problem_type_of(config.problem_type, labels, pooled_logits.shape[1])
    if config.problem_type == "single_label_classification":
        return cross_entropy(pooled_logits, labels, num_items_in_batch)
    of_each = F.mse_loss if config.problem_type == "regression" else F.binary_cross_entropy_with_logits
    logits = _wide(pooled_logits)
    wanted = labels.to(logits.device, logits.dtype).reshape(logits.shape)
    return _divided(of_each(logits, wanted, reduction="sum"), wanted.numel(), num_items_in_batch)


def token_classification_loss(
    logits: torch.Tensor, labels: torch.Tensor, config: Any = None, num_items_in_batch: Count = None, **kwargs: Any
) -> torch.Tensor:
    """Cross-entropy of (B, L, C) at the tokens whose class (B, L) is not -100."""
    return cross_entropy(logits.flatten(0, 1), labels, num_items_in_batch)


def question_answering_loss(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    start_positions: torch.Tensor,
    end_positions: torch.Tensor,
    num_items_in_batch: Count = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Half the cross-entropy of the start (B, L) and half that of the end; a position beyond the row adds nothing.

    The sum is divided by the rows of this batch, or by `num_items_in_batch` rows. (transformers divides each half by
    the positions within their rows. The `Trainer` does not count them, so that micro-batches with fewer of them would
    weigh more, and one without any would be NaN.)
    """
    length = start_logits.shape[1]
    ends = ((start_logits, start_positions), (end_logits, end_positions))
    total = sum(
        F.cross_entropy(
            _wide(logits), at.to(logits.device).reshape(-1).clamp(max=length), ignore_index=length, reduction="sum"
        )
        for logits, at in ends
    )
    return _divided(total / 2, start_logits.shape[0], num_items_in_batch)  # type: ignore[arg-type]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Count = None) -> torch.Tensor:
    """Of (N, C) and N class indices, -100 to ignore one: the mean over the others, or their sum divided by
    `num_items_in_batch`."""
    logits, labels = _wide(logits), labels.to(logits.device).reshape(-1).long()
    if num_items_in_batch is None:
        return F.cross_entropy(logits, labels)
    return _divided(F.cross_entropy(logits, labels, reduction="sum"), 0, num_items_in_batch)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _divided(total: torch.Tensor, of_this_batch: int, num_items_in_batch: Count) -> torch.Tensor:
    if num_items_in_batch is None:
        return total / of_this_batch
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch
