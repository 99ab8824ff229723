"""The chunked computation: loss and gradients together."""

import torch
import torch.nn.functional as F


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropies of rows (T, D) under a linear layer (V, D), a chunk of rows at a time."""

    @staticmethod
    def forward(ctx, rows, weight, bias, labels, ignore_index, chunk_size):
        dtype = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=rows.device)
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        drows = torch.empty_like(rows) if wants_rows else None
        dweight = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        dbias = torch.zeros_like(bias, dtype=dtype) if wants_bias else None
        for start in range(0, rows.shape[0], chunk_size):
            chunk, targets = rows[start : start + chunk_size], labels[start : start + chunk_size]
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
        ctx.save_for_backward(drows, dweight, dbias)
        ctx.dtypes = rows.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        gradients = (
            None if gradient is None else (gradient * dloss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return (*gradients, None, None, None)
