"""The Longhorn recurrence, token by token (section 3 of arXiv 2407.14207, equations 8 and 9)."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.pages import gathers_pages
from hf_hybrid_ssm.ops.core.self_check import draw


class ScanInputs(NamedTuple):
    """What implementations of the scan and of its step take, checked, in the order of C; shapes as in `longhorn_scan`.

    Args:
        state: before the first token, (B, D, N); a step overwrites it, where it may be (P, D, N) with `pages`.
        seq_idx, lengths: of `Rows`; padding belongs to the last document.
        pages: of a step, (B,), which of P states each row has.
        keeps: of a kernel, whether a backward follows, for which it keeps states.
    """

    x: torch.Tensor
    beta_logit: torch.Tensor
    k: torch.Tensor
    q: torch.Tensor
    z: torch.Tensor | None = None
    beta_bias: torch.Tensor | None = None
    D: torch.Tensor | None = None
    state: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    keeps: bool = False


def needs_gradient(inputs: ScanInputs) -> bool:
    """Whether a backward may follow."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs[:8])


def scan_flops(inputs: Any) -> int:
    """Of shapes, nine for each number of the state: square of the key, decay (2), written value (2), update (2),
    read-out (2)."""
    return 9 * math.prod(inputs.x) * inputs.k[-1]


def longhorn_scan_reference(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; computes in float32, or in float64 for float64 inputs."""
    x, beta_logit, k, q, z, beta_bias, D, initial_state, seq_idx, lengths, *_ = inputs
    dtype, output_dtype = torch.promote_types(x.dtype, torch.float32), x.dtype
    x, k, q, beta_logit = x.to(dtype), k.to(dtype), q.to(dtype), beta_logit.to(dtype)
    beta = torch.sigmoid(beta_logit if beta_bias is None else beta_logit + beta_bias)
    h = x.new_zeros(x.shape[0], x.shape[2], k.shape[-1]) if initial_state is None else initial_state.to(dtype)
    k, q = (_by_channel(tokens, x.shape[2]) for tokens in (k, q))
    outputs = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            h = h * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None]
        key = k[:, t]  # (B, 1 or D, N)
        kk = (key**2).sum(-1)
        delta = (beta[:, t] / (1 + beta[:, t] * kk))[:, :, None]  # (B, D, 1)
        after = (1 - delta * key**2) * h + delta * x[:, t, :, None] * key
        outputs.append((after * q[:, t]).sum(-1))
        h = after if lengths is None else torch.where((t < lengths)[:, None, None], after, h)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(output_dtype), h


def _by_channel(tokens: torch.Tensor, channels: int) -> torch.Tensor:
    """Keys or queries (B, L, N) of all channels, or (B, L, H, N) of heads → (B, L, 1 or D, N)."""
    if tokens.dim() == 3:
        return tokens.unsqueeze(2)
    return tokens.repeat_interleave(channels // tokens.shape[2], dim=2)


def _example(length: int, channels: int, states: int, batch: int = 1) -> ScanInputs:
    tokens, keys = (batch, length, channels), (batch, length, states)
    shapes = {"x": tokens, "beta_logit": tokens, "z": tokens, "k": keys, "q": keys, "beta_bias": (channels,)}
    return ScanInputs(**draw(shapes | {"D": (channels,), "state": (batch, channels, states)}))


EXAMPLES = (
    lambda: _example(67, 18, 16),  # longer than a block, with channels that do not fill a tile
    lambda: _example(67, 32, 16),  # rows that begin at multiples of 16 bytes, as those of models
    # so many states that the backward of 16-bit inputs may take them in chunks of tokens; the last chunk is not whole
    lambda: _example(67, 18, 33),
)
STEP_EXAMPLES = (lambda: _example(1, 18, 21, batch=2), lambda: _example(1, 32, 16, batch=2))


@gathers_pages
def longhorn_step_reference(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of one token x (B, 1, D) after `state`, which is overwritten."""
    assert inputs.state is not None
    y, after = longhorn_scan_reference(inputs)
    return y, inputs.state.copy_(after)
