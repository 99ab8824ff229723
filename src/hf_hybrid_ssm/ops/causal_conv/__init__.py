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
from hf_hybrid_ssm.ops.core.pages import PagedState, check_pages, on_pages
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows, is_one_token

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
    batch, length, _ = x.shape
    _check_filter(x, initial_state, weight, bias, activation)
    if is_one_token(rows, length, initial_state):
        y, after = _one_token(x, initial_state, weight, bias, activation, rows, backend)  # type: ignore[arg-type]
        return y, after if rows.return_final_state else None
    if isinstance(initial_state, PagedState):
        raise ValueError("initial_state is a PagedState: only a step goes on from one, with rows.is_step=True.")
    seq_idx, lengths = checked_rows(rows, batch, length)
    if length == 0:
        empty = last_inputs(x, weight.shape[1], initial_state, seq_idx, lengths)
        return torch.zeros_like(x), empty if rows.return_final_state else None
    run = _OP.select(x.device.type, x.dtype, backend)
    y, final_state = run(
        x, weight, bias, activation=activation, initial_state=initial_state, seq_idx=seq_idx, lengths=lengths
    )
    return y, final_state if rows.return_final_state else None


def _one_token(
    x: torch.Tensor,
    state: torch.Tensor | PagedState,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    rows: Rows,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor | PagedState]:
    """y of one token (B, 1, D) and the state after it."""
    run = _STEP.select(x.device.type, x.dtype, backend)
    if isinstance(state, PagedState):
        check_pages(state.pages, x.shape[0], state.memory)

        def step(memory: torch.Tensor, **pages: torch.Tensor) -> torch.Tensor:
            return run(x, memory, weight, bias, activation=activation, **pages)[0]

        return on_pages(run, step, state.memory, state.pages), state
    if rows.overwrites_states:
        check_overwritten("initial_state", state, dense="contiguous")
    else:
        state = state.clone(memory_format=torch.contiguous_format)
    return run(x, state, weight, bias, activation=activation)


def _check_filter(
    x: torch.Tensor,
    state: torch.Tensor | PagedState | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> None:
    batch, channels = x.shape[0], x.shape[2]
    check_tensor("weight", weight, (channels, None), "D, K", beside=x)
    check_tensor("bias", bias, (channels,), "D", beside=x, optional=True)
    if weight.shape[1] == 0:
        raise ValueError("weight must have at least one tap (K ≥ 1), got K = 0.")
    shape = (weight.shape[1] - 1, channels)
    if isinstance(state, PagedState):
        check_tensor("initial_state.memory", state.memory, (None, *shape), "P, K - 1, D", beside=x)
    else:
        check_tensor("initial_state", state, (batch, *shape), "B, K - 1, D", beside=x, optional=True)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}.")


__all__ = ["causal_conv"]
