"""The Longhorn scan: online associative recall, one closed-form step per token."""

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.padding import extend_last_document
from hf_hybrid_ssm.ops.core.pages import PagedState, held_state, run_step
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows, is_one_token
from hf_hybrid_ssm.ops.longhorn_scan.reference import (
    EXAMPLES,
    STEP_EXAMPLES,
    ScanInputs,
    longhorn_scan_reference,
    longhorn_step_reference,
)
from hf_hybrid_ssm.ops.longhorn_scan.torch_backend import longhorn_scan_torch, longhorn_step_torch

_OP = Op(
    "longhorn_scan",
    builtin={"torch": longhorn_scan_torch, "reference": longhorn_scan_reference},
    kernels={"native": "hf_hybrid_ssm.ops.longhorn_scan.native", "triton": "hf_hybrid_ssm.ops.longhorn_scan.triton"},
    examples=EXAMPLES,
    opaque=("torch",),
)
_STEP = Op(
    "longhorn_step",
    builtin={"torch": longhorn_step_torch, "reference": longhorn_step_reference},
    kernels={
        "native": "hf_hybrid_ssm.ops.longhorn_scan.native",
        "triton": "hf_hybrid_ssm.ops.longhorn_scan.triton_step",
    },
    examples=STEP_EXAMPLES,
    differentiable=False,
)


def longhorn_scan(
    x: torch.Tensor,
    beta_logit: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    *,
    beta_bias: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | PagedState | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | PagedState | None]:
    r"""Each channel keeps a linear predictor h of its value from the key and refits it at every token:

        Δ_t = β_t / (1 + β_t |k_t|²),   β_t = sigmoid(beta_logit_t + beta_bias)
        h_t = (1 - Δ_t k_t²) h_{t-1} + Δ_t x_t k_t
        y_t = (h_t · q_t + D x_t) · silu(z_t)

    (arXiv 2407.14207, equations 8 and 9; all products with k elementwise, |k|² summed in float32.) A token with k = 0
    leaves the state exactly as it is.

    Args:
        x: values (B, L, D).
        beta_logit: logit of β without its bias, (B, L, D).
        k, q: keys and queries, (B, L, N) where all channels share them, or (B, L, H, N): of H heads, each of which
            has D / H consecutive channels.
        beta_bias: (D,), added to the logit in float32.
        D: skip weight (D,).
        z: output gate (B, L, D).
        rows: how the rows are read; the state is zero where a document begins.
        initial_state: (B, D, N), the state before the first token; zero by default. A step also takes a `PagedState`:
            Triton's kernel works on the pages where they lie, and so does that in C if they are float32; elsewhere,
            and with heads, they are gathered, and put back.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, L, D) in the dtype of x, and the final state (B, D, N) in float32 (float64 for float64 inputs), or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating point dtype, got {x.dtype}.")
    batch, length, channels = x.shape
    heads: tuple[int, ...] = ()
    of_states = "B, L, N"
    if isinstance(k, torch.Tensor) and k.dim() == 4:
        heads, of_states = (k.shape[2],), "B, L, H, N"
        if not heads[0] or channels % heads[0]:
            raise ValueError(f"k has {heads[0]} heads, which must divide the {channels} channels of x.")
    check_tensor("k", k, (batch, length, *heads, None), of_states, like=x)
    check_tensor("q", q, (batch, length, *heads, k.shape[-1]), of_states, like=x)
    check_tensor("beta_logit", beta_logit, (batch, length, channels), "B, L, D", like=x)
    check_tensor("z", z, (batch, length, channels), "B, L, D", like=x, optional=True)
    check_tensor("beta_bias", beta_bias, (channels,), "D", beside=x, optional=True)
    check_tensor("D", D, (channels,), "D", beside=x, optional=True)
    state, pages = held_state(initial_state, x, (channels, k.shape[-1]), "D, N")
    if is_one_token(rows, length, initial_state):
        inputs = ScanInputs(x, beta_logit, k, q, z, beta_bias, D, state, None, None, pages)
        y, after = run_step(_STEP.select(x.device.type, x.dtype, backend), inputs, rows.overwrites_states)
        return y, (after if pages is None else initial_state) if rows.return_final_state else None
    if pages is not None:
        raise ValueError("initial_state is a PagedState: only a step goes on from one, with rows.is_step=True.")
    seq_idx, lengths = checked_rows(rows, batch, length)
    if length == 0:
        dtype = torch.promote_types(x.dtype, torch.float32)
        state = x.new_zeros(batch, channels, k.shape[-1], dtype=dtype) if state is None else state.to(dtype)
        return torch.zeros_like(x), state if rows.return_final_state else None
    if seq_idx is not None and lengths is not None:
        seq_idx = extend_last_document(seq_idx, lengths)
    run = _OP.select(x.device.type, x.dtype, backend)
    y, final_state = run(ScanInputs(x, beta_logit, k, q, z, beta_bias, D, state, seq_idx, lengths))
    return y, final_state if rows.return_final_state else None


__all__ = ["longhorn_scan"]
