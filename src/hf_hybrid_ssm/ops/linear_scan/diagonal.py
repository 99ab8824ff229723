r"""Diagonal recurrence whose states are themselves the result: h_t = a h_{t-1} + x_t (S5)."""

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.linear_scan.reference import DIAGONAL_EXAMPLES, DiagonalInputs, diagonal_scan_reference
from hf_hybrid_ssm.ops.linear_scan.torch_backend import diagonal_scan_torch

_OP = Op(
    "diagonal_scan",
    builtin={"torch": diagonal_scan_torch, "reference": diagonal_scan_reference},
    kernels={
        "native": "hf_hybrid_ssm.ops.linear_scan.native",
        "triton": "hf_hybrid_ssm.ops.linear_scan.triton",
    },
    examples=DIAGONAL_EXAMPLES,
)
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def diagonal_scan(
    decay: torch.Tensor,
    x: torch.Tensor,
    *,
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""All states of a time-invariant diagonal recurrence, in memory linear in L.

        h_t = a h_{t-1} + x_t

    Args:
        decay: (M,) a, of x's dtype, or twice as precise: its powers are then computed in that precision and rounded
            once. If an a near 1 were rounded to float32, the state would decay at a different rate.
        x: (B, L, M), real (float32, float64) or complex (complex64, complex128).
        rows: how the rows are read; the state is zero where a document begins, and padding moves only the final state.
        initial_state: (B, M) the state before the first token (zeros when None).

    Returns:
        h (B, L, M), and the final state (B, M) or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    check_tensor("x", x, (None, None, None), "B, L, M")
    if x.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise TypeError(f"x must be float32, float64, complex64 or complex128, got {x.dtype}.")
    batch, length, size = x.shape
    is_wide = isinstance(decay, torch.Tensor) and decay.dtype == _WIDE.get(x.dtype)
    check_tensor("decay", decay, (size,), "M", like=x.new_empty(0, dtype=decay.dtype) if is_wide else x)
    check_tensor("initial_state", initial_state, (batch, size), "B, M", like=x, optional=True)
    seq_idx, lengths = checked_rows(rows, batch, length)
    scan = _OP.select(x.device.type, _PARTS.get(x.dtype, x.dtype), backend)
    with without_autocast(x.device.type):
        h = x
        if x.numel():
            start = None if initial_state is None else _pairs(initial_state)
            (h,) = scan(DiagonalInputs(_pairs(x), _pairs(decay), start, seq_idx))
            h = torch.view_as_complex(h) if x.is_complex() else h
    if not rows.return_final_state:
        return h, None
    if lengths is None and length:
        return h, h[:, -1]
    start = x.new_zeros(batch, size) if initial_state is None else initial_state
    states = torch.cat([start.unsqueeze(1), h], dim=1)
    counts = torch.zeros(batch, dtype=torch.int64, device=x.device) if lengths is None else lengths.to(torch.int64)
    return h, states.gather(1, counts.view(-1, 1, 1).expand(-1, 1, size)).squeeze(1)


def _pairs(tensor: torch.Tensor) -> torch.Tensor:
    """(..., M) complex → (..., M, 2) real; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
