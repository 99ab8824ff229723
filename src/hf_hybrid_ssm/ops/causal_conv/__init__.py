"""The short depthwise causal convolution that precedes a recurrence, with its own small state."""

import torch

from hf_hybrid_ssm.ops.causal_conv.reference import (
    EXAMPLES,
    STEP_EXAMPLES,
    ConvInputs,
    causal_conv_reference,
    causal_conv_step_reference,
)
from hf_hybrid_ssm.ops.causal_conv.torch_backend import causal_conv_step_torch, causal_conv_torch
from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.padding import last_inputs
from hf_hybrid_ssm.ops.core.pages import PagedState, held_state, run_step
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows, is_one_token

_OP = Op(
    "causal_conv",
    builtin={"torch": causal_conv_torch, "reference": causal_conv_reference},
    kernels={"native": "hf_hybrid_ssm.ops.causal_conv.native", "triton": "hf_hybrid_ssm.ops.causal_conv.triton"},
    examples=EXAMPLES,
)
_STEP = Op(
    "causal_conv_step",
    builtin={"torch": causal_conv_step_torch, "reference": causal_conv_step_reference},
    kernels={"native": "hf_hybrid_ssm.ops.causal_conv.native", "triton": "hf_hybrid_ssm.ops.causal_conv.triton"},
    examples=STEP_EXAMPLES,
    differentiable=False,
)
ACTIVATIONS = (None, "silu")


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | PagedState | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | PagedState | None]:
    r"""y_ti = act(bias_i + Σ_j w_ij x_{t-K+1+j, i}): each channel has K taps, the last one on the token itself.

    Args:
        x: (B, L, D).
        weight: (D, K).
        bias: (D,).
        activation: None or "silu".
        rows: how the rows are read; no tap reaches into another document. The final state is the inputs that the next
            token needs.
        initial_state: (B, K - 1, D), the inputs before the first token, oldest first; zero by default. A step also
            takes a `PagedState`: Triton's kernel works on the pages where they lie, and so does that in C if they are
            float32; elsewhere they are gathered, and put back.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, L, D), and the final state (B, K - 1, D) or None; both in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown activation or backend.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating point dtype, got {x.dtype}.")
    batch, length, channels = x.shape
    check_tensor("weight", weight, (channels, None), "D, K", beside=x)
    check_tensor("bias", bias, (channels,), "D", beside=x, optional=True)
    width = weight.shape[1]
    if width == 0:
        raise ValueError("weight must have at least one tap (K ≥ 1), got K = 0.")
    state, pages = held_state(initial_state, x, (width - 1, channels), "K - 1, D")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}.")
    silu = activation == "silu"
    if is_one_token(rows, length, initial_state):
        inputs = ConvInputs(x, weight, bias, state, None, None, silu, pages)
        y, after = run_step(_STEP.select(x.device.type, x.dtype, backend), inputs, rows.overwrites_states)
        return y, (after if pages is None else initial_state) if rows.return_final_state else None
    if pages is not None:
        raise ValueError("initial_state is a PagedState: only a step goes on from one, with rows.is_step=True.")
    seq_idx, lengths = checked_rows(rows, batch, length)
    if length == 0:
        empty = last_inputs(x, width, state, seq_idx, lengths)
        return torch.zeros_like(x), empty if rows.return_final_state else None
    run = _OP.select(x.device.type, x.dtype, backend)
    y, final_state = run(ConvInputs(x, weight, bias, state, seq_idx, lengths, silu))
    return y, final_state if rows.return_final_state else None


__all__ = ["causal_conv"]
