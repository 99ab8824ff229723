"""Kullback-Leibler divergence between the outputs of two linear layers that never holds more than a chunk of them."""

from typing import Any

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.checks import can_read_values, check_tensor
from hf_hybrid_ssm.ops.core.custom_ops import refuse_second_derivative
from hf_hybrid_ssm.ops.core.dispatch import forced_backend
from hf_hybrid_ssm.ops.core.transforms import is_transforming
from hf_hybrid_ssm.ops.linear_cross_entropy import CHUNK_NUMBERS


def linear_kl_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """T² Σ_i w_i KL(p_i || q_i) / Σ_i w_i, p = softmax(teacher_hidden @ teacher_weight.T / T), q of hidden and weight
    alike, with memory for `chunk_size` rows of logits.

    The gradients of a chunk are computed with its divergence, so that backward only scales them. Rows of weight 0 are
    not multiplied on CPU. There is no second derivative but with the backend "reference", which is the equation.

    Args:
        hidden: (..., D), of the student.
        weight: (V, D), as in `nn.Linear`.
        teacher_hidden: (..., E), with the same rows; without gradient.
        teacher_weight: (V, E); without gradient.
        row_weights: (...) float, none negative; by default every row counts alike.
        temperature: T, positive.
        chunk_size: rows at a time; about four million logits by default.

    Returns:
        The divergence in nats, a float32 scalar (float64 for float64 inputs); NaN where no row counts.

    Raises:
        TypeError, ValueError: wrong types, shapes or numbers.
    """
    rows_shape, classes = tuple(hidden.shape[:-1]), weight.shape[0]
    check_tensor("weight", weight, (None, hidden.shape[-1]), "V, D", like=hidden)
    check_tensor("teacher_hidden", teacher_hidden, (*rows_shape, None), "rows of hidden, E")
    check_tensor("teacher_weight", teacher_weight, (classes, teacher_hidden.shape[-1]), "V, E", like=teacher_hidden)
    check_tensor("row_weights", row_weights, rows_shape, "shape of hidden without D", optional=True)
    if row_weights is not None and can_read_values(row_weights) and bool((row_weights < 0).any()):
        raise ValueError(f"row_weights must not be negative, got {float(row_weights.min())}.")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive.")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be positive.")
    chunk_size = chunk_size or max(1, CHUNK_NUMBERS // classes)
    flat, theirs = hidden.reshape(-1, hidden.shape[-1]), teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1])
    dtype = torch.promote_types(flat.dtype, torch.float32)
    weights = torch.ones(flat.shape[0], device=flat.device) if row_weights is None else row_weights.reshape(-1)
    weights = weights.detach().to(dtype)
    total = weights.sum()
    teacher_weight = teacher_weight.detach()
    if is_transforming() or forced_backend() == "reference":  # the hand-written gradient has no rules for it
        ours = F.log_softmax(F.linear(flat, weight).to(dtype) / temperature, -1)
        wanted = F.log_softmax(F.linear(theirs, teacher_weight).to(dtype) / temperature, -1)
        divergence = ((wanted.exp() * (wanted - ours)).sum(-1) * weights).sum()
    else:
        if row_weights is not None and can_read_values(weights):  # rows that do not count cost nothing
            counts = weights > 0
            flat, theirs, weights = flat[counts], theirs[counts], weights[counts]
        divergence = _ChunkedLinearKL.apply(flat, weight, theirs, teacher_weight, weights, temperature, chunk_size)
    return divergence / (total / temperature**2)


class _ChunkedLinearKL(torch.autograd.Function):
    """Σ_i w_i KL(p_i || q_i) of rows (T, D) and (T, E) under linear layers with V outputs, a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        theirs: torch.Tensor,
        teacher_weight: torch.Tensor,
        weights: torch.Tensor,
        temperature: float,
        chunk_size: int,
    ) -> torch.Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        drows = torch.empty_like(hidden) if wants_rows else None
        dweight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        for start in range(0, hidden.shape[0], chunk_size):
            piece = slice(start, start + chunk_size)
            chunk, counted = hidden[piece], weights[piece].unsqueeze(1)
            ours = F.linear(chunk, weight).to(dtype).div_(temperature)
            ours.sub_(ours.logsumexp(1, keepdim=True))
            wanted = F.linear(theirs[piece], teacher_weight).to(dtype).div_(temperature)
            wanted.sub_(wanted.logsumexp(1, keepdim=True))
            p = wanted.exp()
            total += (wanted.sub_(ours).mul_(p).sum(1, keepdim=True) * counted).sum()
            if not (wants_rows or wants_weight):
                continue
            gradient = ours.exp_().sub_(p).mul_(counted / temperature)  # of the student's logits
            if drows is not None:
                drows[piece] = gradient.to(weight.dtype) @ weight
            if dweight is not None:
                dweight += (gradient.to(chunk.dtype).T @ chunk).to(dtype)
        ctx.save_for_backward(drows, dweight, total)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, total = ctx.saved_tensors
        gradients = [
            None if gradient is None else (gradient * dtotal).to(dtype) for gradient, dtype in zip(saved, ctx.dtypes)
        ]
        refused = refuse_second_derivative("linear_kl_divergence", gradients, total)
        return (*refused, None, None, None, None, None)
