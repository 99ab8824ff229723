"""The Longhorn scan: online associative recall, one closed-form step per token."""

import torch

from hf_hybrid_ssm.ops.core.checks import check_overwritten, check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.padding import extend_last_document
from hf_hybrid_ssm.ops.core.pages import check_pages, on_pages
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows
from hf_hybrid_ssm.ops.longhorn_scan.reference import (
    aligned_self_check_inputs,
    aligned_step_self_check_inputs,
    longhorn_scan_reference,
    longhorn_step_reference,
    self_check_inputs,
    self_check_inputs_of_many_states,
    step_self_check_inputs,
)
from hf_hybrid_ssm.ops.longhorn_scan.torch_backend import longhorn_scan_torch, longhorn_step_torch

_OP = Op(
    "longhorn_scan",
    builtin={"torch": longhorn_scan_torch, "reference": longhorn_scan_reference},
    kernels={"native": "hf_hybrid_ssm.ops.longhorn_scan.native", "triton": "hf_hybrid_ssm.ops.longhorn_scan.triton"},
    self_check_inputs=self_check_inputs,
    further_inputs=(aligned_self_check_inputs, self_check_inputs_of_many_states),
    opaque=("torch",),
)
_STEP = Op(
    "longhorn_step",
    builtin={"torch": longhorn_step_torch, "reference": longhorn_step_reference},
    kernels={
        "native": "hf_hybrid_ssm.ops.longhorn_scan.native",
        "triton": "hf_hybrid_ssm.ops.longhorn_scan.triton_step",
    },
    self_check_inputs=step_self_check_inputs,
    further_inputs=(aligned_step_self_check_inputs,),
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
    initial_state: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
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
        initial_state: (B, D, N), the state before the first token; zero by default.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, L, D) in the dtype of x, and the final state (B, D, N) in float32 (float64 for float64 inputs), or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating point dtype, got {x.dtype}.")
    _check(x, beta_logit, k, q, beta_bias, D, z)
    shape = (x.shape[0], x.shape[2], k.shape[-1])
    check_tensor("initial_state", initial_state, shape, "B, D, N", beside=x, optional=True)
    batch, length, channels = x.shape
    seq_idx, lengths = checked_rows(rows, batch, length)
    if length == 0:
        state = x.new_zeros(batch, channels, k.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
        state = state if initial_state is None else initial_state.to(state.dtype)
        return torch.zeros_like(x), state if rows.return_final_state else None
    if seq_idx is not None and lengths is not None:
        seq_idx = extend_last_document(seq_idx, lengths)
    run = _OP.select(x.device.type, x.dtype, backend)
    options = {"beta_bias": beta_bias, "D": D, "z": z, "initial_state": initial_state}
    y, final_state = run(x, beta_logit, k, q, **options, seq_idx=seq_idx, lengths=lengths)
    return y, final_state if rows.return_final_state else None


def longhorn_step(
    x: torch.Tensor,
    beta_logit: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    state: torch.Tensor,
    *,
    beta_bias: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`longhorn_scan` of one token of each row, without gradients; `state` becomes the one after it, in place.

    Args:
        x, beta_logit, z: (B, D), one dtype.
        k, q: (B, N) or (B, H, N), of the same dtype.
        state: (B, D, N), contiguous, in any floating point dtype; computed with in float32 or wider.
        beta_bias, D: (D,).
        pages: (B,) int64; `state` is then memory of P pages, (P, D, N), which may lie apart, and row b goes on
            from `state[pages[b]]`. No page may be given twice. Triton's kernel works on the pages where they lie, and
            so does that in C if they are float32; elsewhere, and with heads, they are gathered, and put back.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, D) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("x", x, (None, None), "B, D")
    batch, channels = x.shape
    if pages is None:
        check_tensor("state", state, (batch, channels, None), "B, D, N", beside=x)
        check_overwritten("state", state, dense="contiguous")
    else:
        check_tensor("state", state, (None, channels, None), "P, D, N", beside=x)
        check_pages(pages, batch, state)
    _check(x, beta_logit, k, q, beta_bias, D, z, state.shape[2])
    run = _STEP.select(x.device.type, x.dtype, backend)

    def step(held: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return run(x, beta_logit, k, q, held, beta_bias=beta_bias, D=D, z=z, **given)[0]

    return step(state) if pages is None else on_pages(run, step, state, pages)


def _check(x, beta_logit, k, q, beta_bias, D, z, states=None) -> None:
    """What both take, for x (B, [L,] D)."""
    *rows, channels = x.shape
    of_channels, of_states = ("B, L, D", "B, L, N") if len(rows) == 2 else ("B, D", "B, N")
    heads: list[int] = []
    if isinstance(k, torch.Tensor) and k.dim() == len(rows) + 2:
        heads, of_states = [k.shape[-2]], of_states.replace("N", "H, N")
        if not heads[0] or channels % heads[0]:
            raise ValueError(f"k has {heads[0]} heads, which must divide the {channels} channels of x.")
    check_tensor("k", k, (*rows, *heads, states), of_states, like=x)
    check_tensor("q", q, (*rows, *heads, k.shape[-1]), of_states, like=x)
    check_tensor("beta_logit", beta_logit, (*rows, channels), of_channels, like=x)
    check_tensor("z", z, (*rows, channels), of_channels, like=x, optional=True)
    check_tensor("beta_bias", beta_bias, (channels,), "D", beside=x, optional=True)
    check_tensor("D", D, (channels,), "D", beside=x, optional=True)


__all__ = ["longhorn_scan", "longhorn_step"]
