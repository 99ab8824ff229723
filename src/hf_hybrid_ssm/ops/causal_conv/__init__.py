"""The short depthwise causal convolution that precedes a recurrence, with its own small state."""

import torch

from hf_hybrid_ssm.ops.causal_conv.reference import (
    aligned_self_check_inputs,
    aligned_step_self_check_inputs,
    causal_conv_reference,
    causal_conv_step_reference,
    self_check_inputs,
    step_self_check_inputs,
)
from hf_hybrid_ssm.ops.causal_conv.torch_backend import causal_conv_step_torch, causal_conv_torch
from hf_hybrid_ssm.ops.core.checks import check_overwritten, check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.padding import last_inputs
from hf_hybrid_ssm.ops.core.pages import check_pages, on_pages
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows

_OP = Op(
    "causal_conv",
    builtin={"torch": causal_conv_torch, "reference": causal_conv_reference},
    kernels={"native": "hf_hybrid_ssm.ops.causal_conv.native", "triton": "hf_hybrid_ssm.ops.causal_conv.triton"},
    self_check_inputs=self_check_inputs,
    further_inputs=(aligned_self_check_inputs,),
)
_STEP = Op(
    "causal_conv_step",
    builtin={"torch": causal_conv_step_torch, "reference": causal_conv_step_reference},
    kernels={"native": "hf_hybrid_ssm.ops.causal_conv.native", "triton": "hf_hybrid_ssm.ops.causal_conv.triton"},
    self_check_inputs=step_self_check_inputs,
    further_inputs=(aligned_step_self_check_inputs,),
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
    initial_state: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""y_ti = act(bias_i + Σ_j w_ij x_{t-K+1+j, i}): each channel has K taps, the last one on the token itself.

    Args:
        x: (B, L, D).
        weight: (D, K).
        bias: (D,).
        activation: None or "silu".
        rows: how the rows are read; no tap reaches into another document. The final state is the inputs that the next
            token needs.
        initial_state: (B, K - 1, D), the inputs before the first token, oldest first; zero by default.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, L, D), and the final state (B, K - 1, D) or None; both in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown activation or backend.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating point dtype, got {x.dtype}.")
    batch, length, _ = x.shape
    _check_filter(x, initial_state, weight, bias, activation)
    seq_idx, lengths = checked_rows(rows, batch, length)
    if length == 0:
        empty = last_inputs(x, weight.shape[1], initial_state, seq_idx, lengths)
        return torch.zeros_like(x), empty if rows.return_final_state else None
    run = _OP.select(x.device.type, x.dtype, backend)
    y, final_state = run(
        x, weight, bias, activation=activation, initial_state=initial_state, seq_idx=seq_idx, lengths=lengths
    )
    return y, final_state if rows.return_final_state else None


def causal_conv_step(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    pages: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`causal_conv` of one token of each row, without gradients; `state` becomes the one after it, in place.

    Args:
        x: (B, D).
        state: (B, K - 1, D), contiguous: the inputs before it, oldest first.
        weight, bias, activation, backend: as for `causal_conv`.
        pages: (B,) int64; `state` is then memory of P pages, (P, K - 1, D), which may lie apart, and row b goes on
            from `state[pages[b]]`. No page may be given twice. Triton's kernel works on the pages where they lie, and
            so does that in C if they are float32; elsewhere they are gathered, and put back.

    Returns:
        y (B, D) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown activation or backend.
    """
    check_tensor("x", x, (None, None), "B, D")
    _check_filter(x, state, weight, bias, activation, in_pages=pages is not None)
    if pages is None:
        check_overwritten("state", state, dense="contiguous")
    else:
        check_pages(pages, x.shape[0], state)
    run = _STEP.select(x.device.type, x.dtype, backend)

    def step(held: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return run(x, held, weight, bias, activation=activation, **given)[0]

    return step(state) if pages is None else on_pages(run, step, state, pages)


def _check_filter(x, state, weight, bias, activation, in_pages=False) -> None:
    """What both take, for x (B, [L,] D)."""
    batch, channels = None if in_pages else x.shape[0], x.shape[-1]
    check_tensor("weight", weight, (channels, None), "D, K", beside=x)
    check_tensor("bias", bias, (channels,), "D", beside=x, optional=True)
    if weight.shape[1] == 0:
        raise ValueError("weight must have at least one tap (K ≥ 1), got K = 0.")
    name = "state" if x.dim() == 2 else "initial_state"
    shape = (batch, weight.shape[1] - 1, channels)
    check_tensor(name, state, shape, "P, K - 1, D" if in_pages else "B, K - 1, D", beside=x, optional=x.dim() == 3)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}.")


__all__ = ["causal_conv", "causal_conv_step"]
