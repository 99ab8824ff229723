"""Attention with a learned bias through torch's fused CPU kernel, which has no gradient for a mask.

Left to itself, torch falls back to the equation and holds all probabilities of all blocks, several times over. Here
the bias's gradient is recomputed block by block from the log-sum-exp that the kernel returns.
"""

from typing import Any

import torch

from hf_hybrid_ssm.ops.core.transforms import is_transforming

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# logits of one slice of the gradient's recomputation; a few of them fit the second-level cache
_SLICE = 2**19


def can_use_cpu_flash_with_bias(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, dropout: float
) -> bool:
    """Whether `biased_attention` can and should take over from `scaled_dot_product_attention`."""
    if bias is None or dropout or torch.compiler.is_compiling() or q.device.type != "cpu" or is_transforming():
        return False
    same_heads, same_size = q.shape[1] == k.shape[1], q.shape[3] == v.shape[3]
    return bias.requires_grad and torch.is_grad_enabled() and same_heads and same_size and q.numel() > 0


def biased_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(scale q kᵀ + mask) v.

    Args:
        q: (R, H, Q, E).
        k, v: (R, H, K, E).
        mask: (R or 1, H, Q, K) in q's dtype, with a gradient; -inf for a key that a query does not see, but not for
            all of its keys.

    Returns:
        (R, H, Q, E).
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # the kernel does not ask
    return _BiasedAttention.apply(q, k, v, mask, scale)


class _BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        y, logsumexp = _FORWARD(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, y, logsumexp)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, y, logsumexp = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is to be differentiated too
            return *_gradients(grad, q, k, v, mask, ctx.scale), None
        grads = _BACKWARD(grad, q, k, v, y, logsumexp, 0.0, False, attn_mask=mask, scale=ctx.scale)
        shift = (grad * y).sum(-1, keepdim=True)
        total = torch.zeros_like(mask)
        count = max(1, _SLICE // mask[0].numel())
        for begin in range(0, q.shape[0], count):
            part = slice(begin, begin + count)
            of_part = slice(None) if mask.shape[0] == 1 else part
            logits = (q[part] * ctx.scale) @ k[part].transpose(2, 3)
            weights = logits.add_(mask[of_part]).sub_(logsumexp[part].unsqueeze(-1)).exp_()
            change = (grad[part] @ v[part].transpose(2, 3)).sub_(shift[part]).mul_(weights)
            total[of_part] += change.sum(0, keepdim=True) if mask.shape[0] == 1 else change
        return *grads, total, None


def _gradients(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, ...]:
    """Those of q, k, v and the mask, by operations that have derivatives themselves."""
    weights = ((q * scale) @ k.transpose(2, 3) + mask).softmax(-1)
    of_weights = grad @ v.transpose(2, 3)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    of_mask = of_logits.sum(0, keepdim=True) if mask.shape[0] == 1 else of_logits
    return scale * of_logits @ k, scale * of_logits.transpose(2, 3) @ q, weights.transpose(2, 3) @ grad, of_mask
