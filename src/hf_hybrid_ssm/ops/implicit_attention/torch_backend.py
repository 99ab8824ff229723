"""Implicit self-attention in torch: all rows by one batched product, or groups of blocks computed again in the
backward where they would take too much memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from hf_hybrid_ssm.ops.core.transforms import is_transforming, without_autocast
from hf_hybrid_ssm.ops.implicit_attention.reference import ImplicitInputs
from hf_hybrid_ssm.ops.legendre_memory.constants import impulse_response
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import Blocks, by_steps, read_out, read_out_matrices

# Entries of queries, keys and values that a call holds for its backward (twice, so half a gigabyte in float32); a
# longer one computes them again in groups. Holding them takes a quarter off a training step.
HELD = 2**26
GROUP = 2**21


def implicit_attention_torch(inputs: ImplicitInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`."""
    (x, weight, *_), form, state, order, theta = inputs, inputs.form, inputs.state, inputs.order, inputs.theta
    dtype = torch.promote_types(x.dtype, torch.float32)
    stacked = weight.to(dtype).flatten(0, 1)

    def attend(y: torch.Tensor) -> torch.Tensor:
        return _attend(y.unflatten(-2, (3, weight.shape[1])), inputs)

    with without_autocast(x.device.type):
        if form == "recurrent" or x.shape[1] <= 2:
            y, final = by_steps(inputs.memory(x.to(dtype), stacked))
            return attend(y).to(x.dtype), final if inputs.returns_state else None
        blocks = None
        if form == "fft" and state is None:
            y = attend(_convolved(x.to(dtype), stacked, order, theta))
        else:
            blocks = Blocks(x.to(dtype), order, theta, state)
            y = _read_and_attend(blocks, stacked, x.dtype, attend)[:, : x.shape[1]]
        if not inputs.returns_state:
            return y.to(x.dtype), None
        blocks = Blocks(x.to(dtype), order, theta, None) if blocks is None else blocks
        return y.to(x.dtype), blocks.final_state(inputs.lengths)


def _read_and_attend(
    blocks: Blocks, weight: torch.Tensor, dtype: torch.dtype, attend: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """(B, J C, D) from all blocks. The products are made in `dtype`: states are never rounded, what reads them is."""
    batch, count, block, channels = blocks.x.shape
    x, states = (part.flatten(0, 1).to(dtype) for part in (blocks.x, blocks.states))
    from_inputs, from_state = (matrix.to(dtype) for matrix in read_out_matrices(weight, blocks.operators))

    def group(
        from_inputs: torch.Tensor, from_state: torch.Tensor, x: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        y = read_out(from_inputs, from_state, x, states)
        return attend(y.unflatten(1, (block, -1)))  # (n, C, D)

    entries = block * weight.shape[0] * channels
    is_held = x.shape[0] * entries <= HELD or torch.compiler.is_compiling() or is_transforming()
    run = partial(checkpoint, group, use_reentrant=False) if torch.is_grad_enabled() and not is_held else group
    size = max(1, (GROUP if x.is_cpu else HELD) // entries)
    pairs = zip(x.split(size), states.split(size))
    return torch.cat([run(from_inputs, from_state, *pair) for pair in pairs]).view(batch, count * block, channels)


def _attend(y: torch.Tensor, inputs: ImplicitInputs) -> torch.Tensor:
    """(..., 3, q', D) → (..., D): p (S V) = (p S) V, so that S V is never formed; softmax in float32 or wider."""
    _, _, bias, collapse, collapse_bias, _, scale, *_ = inputs
    if bias is not None:
        y = y + bias.to(y.dtype).unsqueeze(-1)
    q, k, v = inputs.activation(y).unbind(-3)
    wide = torch.promote_types(y.dtype, torch.float32)
    logits = q @ k.transpose(-1, -2)
    weights = (logits if scale == 1 else scale * logits).softmax(-1, dtype=wide)  # (..., q', q')
    m = (collapse.to(wide) @ weights).to(v.dtype).unsqueeze(-2) @ v
    m = m.squeeze(-2)
    return m if collapse_bias is None else m + collapse_bias.to(m.dtype)


def _convolved(x: torch.Tensor, weight: torch.Tensor, order: int, theta: float) -> torch.Tensor:
    """W m_t for all t by FFT, as in the paper's appendix A.1: (B, L, 3 q', D).

    Channels go through it in groups, and again in the backward, so that spectra stay small: all of them at once are
    3 q' times as large as two copies of x.
    """
    batch, length = x.shape[:2]
    kernel = weight @ impulse_response(order, theta, length).to(x.device, x.dtype)  # (r, L)
    spectrum = torch.fft.rfft(kernel, 2 * length)

    def group(x: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
        products = torch.fft.rfft(x.transpose(1, 2), 2 * length).unsqueeze(2) * spectrum  # (B, D', r, L + 1)
        return torch.fft.irfft(products, 2 * length)[..., :length]

    again = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transforming()
    size = max(1, GROUP // max(1, batch * len(weight) * 2 * length))
    parts = (
        checkpoint(group, part, spectrum, use_reentrant=False) if again else group(part, spectrum)
        for part in x.split(size, 2)
    )
    return torch.cat(list(parts), 1).permute(0, 3, 2, 1)
