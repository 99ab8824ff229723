"""Cross-entropy of a linear layer's outputs that never holds more than a chunk of them."""

from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_tensor
from hf_hybrid_ssm.ops.core.custom_ops import refuse_second_derivative
from hf_hybrid_ssm.ops.core.dispatch import forced_backend
from hf_hybrid_ssm.ops.core.transforms import is_transforming

REDUCTIONS = ("mean", "sum")
CHUNK_NUMBERS = 2**22  # logits held at a time


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: torch.Tensor | int | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """`cross_entropy(hidden @ weight.T + bias, labels)` with memory for `chunk_size` rows of logits.

    The gradients of a chunk are computed with its loss, so that backward only scales them. On CPU only rows whose
    label counts are multiplied by the weight: a masked language model, or a chat's answers, pay for their own tokens.
    There is no second derivative but with the backend "reference", which is the equation.

    Args:
        hidden: (..., D).
        weight: (V, D), as in `nn.Linear`.
        labels: (...) int64, the class of each row or `ignore_index`.
        bias: (V,).
        reduction: "mean" over the labels that count, or "sum".
        num_items: with "sum", divide by this number (as `Trainer` asks under gradient accumulation).
        chunk_size: rows at a time; about four million logits by default.

    Returns:
        The loss, a float32 scalar (float64 for float64 inputs); NaN for "mean" where no label counts, as in torch.

    Raises:
        TypeError, ValueError: wrong types or shapes, a class without a row, an unknown reduction, `num_items` with
            "mean".
    """
    check_tensor("weight", weight, (None, hidden.shape[-1]), "V, D", like=hidden)
    check_tensor("labels", labels, tuple(hidden.shape[:-1]), "shape of hidden without D")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, got {labels.dtype}.")
    readable = can_read_values(labels)
    if readable:
        counted = labels[labels != ignore_index]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < weight.shape[0]:
            raise ValueError(
                f"labels has classes from {int(counted.min())} to {int(counted.max())}, but weight has "
                f"{weight.shape[0]} rows."
            )
    check_tensor("bias", bias, (weight.shape[0],), "V", like=hidden, optional=True)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} must be one of {', '.join(map(repr, REDUCTIONS))}.")
    if num_items is not None and reduction == "mean":
        raise ValueError('num_items is only meaningful with reduction="sum".')
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be positive.")
    chunk_size = chunk_size or max(1, CHUNK_NUMBERS // weight.shape[0])
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if is_transforming() or forced_backend() == "reference":  # the hand-written gradient has no rules for it
        logits = F.linear(flat, weight, bias).to(torch.promote_types(flat.dtype, torch.float32))
        total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    else:
        if readable and counted.numel() < labels.numel():  # rows whose label does not count cost nothing
            flat, labels = flat[labels != ignore_index], counted
        total = _ChunkedLinearCrossEntropy.apply(flat, weight, bias, labels, ignore_index, chunk_size)
    if reduction == "mean":
        return total / (labels != ignore_index).sum()
    if num_items is None:
        return total
    return total / (num_items.to(total.device) if isinstance(num_items, torch.Tensor) else num_items)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of rows (T, D) under a linear layer (V, D), a chunk of rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        ignore_index: int,
        chunk_size: int,
    ) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        drows = torch.empty_like(hidden) if wants_rows else None
        dweight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        dbias = None if bias is None or not wants_bias else torch.zeros_like(bias, dtype=dtype)
        for start in range(0, hidden.shape[0], chunk_size):
            chunk, targets = hidden[start : start + chunk_size], labels[start : start + chunk_size]
            logits = F.linear(chunk, weight, bias).to(dtype)
            counts = targets != ignore_index
            index = targets.where(counts, 0).unsqueeze(1)
            normalizer = logits.logsumexp(1, keepdim=True)
            total += torch.where(counts.unsqueeze(1), normalizer - logits.gather(1, index), 0).sum()
            if not any(ctx.needs_input_grad[:3]):
                continue
            # softmax minus the target, zero where the label does not count
            gradient = logits.sub_(normalizer).exp_()
            gradient.scatter_add_(1, index, torch.full_like(normalizer, -1.0))
            gradient.mul_(counts.unsqueeze(1))
            if drows is not None:
                drows[start : start + chunk_size] = gradient.to(weight.dtype) @ weight
            if dweight is not None:
                dweight += (gradient.to(chunk.dtype).T @ chunk).to(dtype)
            if dbias is not None:
                dbias += gradient.sum(0)
        ctx.save_for_backward(drows, dweight, dbias, total)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, total = ctx.saved_tensors
        gradients = [
            None if gradient is None else (gradient * dloss).to(dtype) for gradient, dtype in zip(saved, ctx.dtypes)
        ]
        return (*refuse_second_derivative("linear_cross_entropy", gradients, total), None, None, None)
