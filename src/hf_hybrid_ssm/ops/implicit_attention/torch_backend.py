"""Implicit self-attention in torch: groups of blocks at a time, computed again in the backward."""

import torch
from torch.utils.checkpoint import checkpoint

from hf_hybrid_ssm.ops._core.autocast import without_autocast
from hf_hybrid_ssm.ops._core.transforms import is_transforming
from hf_hybrid_ssm.ops.legendre_memory.constants import impulse_response
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import Blocks, by_steps, read_out_matrix

GROUP = 2**21  # entries of queries, keys and values that are held at a time


def implicit_attention_torch(
    x, *, weight, bias, collapse, collapse_bias, activation, scale, theta, state, lengths, form, needs_state
):
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    batch, length, channels = x.shape
    rows, order = weight.shape[1:]
    u, stacked = x.to(dtype), weight.to(dtype).reshape(3 * rows, order)
    bias, collapse, collapse_bias = (None if p is None else p.to(dtype) for p in (bias, collapse, collapse_bias))

    def attend(y: torch.Tensor) -> torch.Tensor:
        return _attend(y.unflatten(-2, (3, rows)), bias, collapse, collapse_bias, activation, scale)

    with without_autocast(x.device.type):
        if form == "recurrent" or length <= 2:
            y, final = by_steps(u, stacked, order, theta, state, lengths)
            return attend(y).to(x.dtype), final
        blocks = Blocks(u, order, theta, state)
        if form == "fft" and state is None:
            y = _convolved(u, stacked, order, theta)
            return attend(y).to(x.dtype), blocks.final_state(lengths)
        matrix = read_out_matrix(stacked, blocks.operators)

        def group(matrix: torch.Tensor, x: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
            y = matrix @ torch.cat([x, states], 2)
            return attend(y.unflatten(2, (blocks.block, 3 * rows)))  # (B, J', C, D)

        size = max(1, GROUP // max(1, batch * blocks.block * 3 * rows * channels))
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transforming()
        parts = []
        for x_part, states in zip(blocks.x.split(size, 1), blocks.states.split(size, 1)):
            inputs = (matrix, x_part, states)
            parts.append(checkpoint(group, *inputs, use_reentrant=False) if again else group(*inputs))
        y = torch.cat(parts, 1).flatten(1, 2)[:, :length]
        return y.to(x.dtype), blocks.final_state(lengths)


def _attend(y, bias, collapse, collapse_bias, activation, scale):
    """(..., 3, q', D) → (..., D): p (S V) = (p S) V, so that S V is never formed."""
    if bias is not None:
        y = y + bias.unsqueeze(-1)
    q, k, v = activation(y).unbind(-3)
    weights = (scale * (q @ k.transpose(-1, -2))).softmax(-1)  # (..., q', q')
    m = (collapse @ weights).unsqueeze(-2) @ v
    m = m.squeeze(-2)
    return m if collapse_bias is None else m + collapse_bias


def _convolved(x, weight, order, theta):
    """W m_t for all t by FFT, as in the paper's appendix A.1: (B, L, 3 q', D)."""
    length = x.shape[1]
    kernel = weight @ impulse_response(order, theta, length).to(x.device, x.dtype)  # (r, L)
    size = 2 * length
    spectrum = torch.fft.rfft(x, size, dim=1).unsqueeze(2) * torch.fft.rfft(kernel, size).T[None, :, :, None]
    return torch.fft.irfft(spectrum, size, dim=1)[:, :length]
