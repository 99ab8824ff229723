"""The Longhorn recurrence, token by token (section 3 of arXiv 2407.14207, equations 8 and 9)."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.self_check import draw


def longhorn_scan_reference(
    x: torch.Tensor,
    beta_logit: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    *,
    beta_bias: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`; computes in float32, or in float64 for float64 inputs."""
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


def self_check_inputs() -> dict:
    """Longer than a block, with channels that do not fill a tile."""
    shapes = dict.fromkeys(("x", "beta_logit", "z"), (1, 67, 18)) | dict.fromkeys("kq", (1, 67, 16))
    return draw(shapes | {"beta_bias": (18,), "D": (18,), "initial_state": (1, 18, 16)})


def aligned_self_check_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models."""
    shapes = dict.fromkeys(("x", "beta_logit", "z"), (1, 67, 32)) | dict.fromkeys("kq", (1, 67, 16))
    return draw(shapes | {"beta_bias": (32,), "D": (32,), "initial_state": (1, 32, 16)})


def self_check_inputs_of_many_states() -> dict:
    """So many that the backward of 16-bit inputs may take them in chunks of tokens; the last chunk is not whole."""
    shapes = dict.fromkeys(("x", "beta_logit", "z"), (1, 67, 18)) | dict.fromkeys("kq", (1, 67, 33))
    return draw(shapes | {"beta_bias": (18,), "D": (18,), "initial_state": (1, 18, 33)})


def longhorn_step_reference(
    x: torch.Tensor,
    beta_logit: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    state: torch.Tensor,
    *,
    beta_bias: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of one token x (B, 1, D) after `state`, which is overwritten."""
    y, after = longhorn_scan_reference(x, beta_logit, k, q, beta_bias=beta_bias, D=D, z=z, initial_state=state)
    return y, state.copy_(after)


def step_self_check_inputs() -> dict:
    """Two rows, and neither channels nor states fill a vector."""
    shapes = dict.fromkeys(("x", "beta_logit", "z"), (2, 1, 18)) | dict.fromkeys("kq", (2, 1, 21))
    return draw(shapes | {"beta_bias": (18,), "D": (18,), "state": (2, 18, 21)})


def aligned_step_self_check_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models."""
    shapes = dict.fromkeys(("x", "beta_logit", "z"), (2, 1, 32)) | dict.fromkeys("kq", (2, 1, 16))
    return draw(shapes | {"beta_bias": (32,), "D": (32,), "state": (2, 32, 16)})
