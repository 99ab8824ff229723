"""The Legendre Memory Unit: every channel's recent past as coefficients of Legendre polynomials."""

import math

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.packed_sequences import run_by_document
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows
from hf_hybrid_ssm.ops.legendre_memory.constants import impulse_response, transition
from hf_hybrid_ssm.ops.legendre_memory.reference import MemoryInputs, legendre_memory_reference
from hf_hybrid_ssm.ops.legendre_memory.torch_backend import legendre_memory_torch

_OP = Op("legendre_memory", builtin={"torch": legendre_memory_torch, "reference": legendre_memory_reference})


def legendre_memory(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    order: int,
    theta: float,
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""m_t = A m_{t-1} + B x_t for each channel (Voelker et al., 2019; zero-order hold), and y_t = W m_t.

    Row i of m_t is the coefficient of the i-th shifted Legendre polynomial over the last `theta` tokens.

    Args:
        x: (B, L, D).
        weight: W (r, q), what to read from the memory; None for all of it.
        order: q, number of polynomials.
        theta: window, in tokens.
        rows: how the rows are read; the memory is empty before each document.
        initial_state: (B, q, D) memory before the first token.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, L, r, D) (r = q without `weight`) in x's dtype, and the memory (B, q, D), float32 or wider, or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or a sequence without end.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    check_tensor("weight", weight, (None, order), "r, q", optional=True)
    check_memory(order, theta, initial_state, x)
    seq_idx, lengths = checked_rows(rows, x.shape[0], x.shape[1])
    inputs = MemoryInputs(x, weight, order, float(theta), initial_state, lengths)
    y, final = run_by_document(_OP.select(x.device.type, x.dtype, backend), inputs, seq_idx)
    return y, final if rows.return_final_state else None


def decode_memory(memory: torch.Tensor, delays: torch.Tensor, *, theta: float) -> torch.Tensor:
    """The tokens `delays` steps ago, as the memory holds them: x_{t-k} ≈ Σ_i P_i(2 (k + 1/2) / theta - 1) m_i.

    Args:
        memory: (..., q, D), a final state or an output of `legendre_memory` without `weight`.
        delays: (K,) how many tokens back, from 0 to `theta`.
        theta: window of the memory, in tokens.

    Returns:
        (..., K, D). Frequencies above q / (pi theta) cycles per token are not in the memory.
    """
    z = 2 * (delays.to(memory.dtype) + 0.5) / theta - 1
    polynomials = [torch.ones_like(z), z]
    for i in range(1, memory.shape[-2] - 1):  # the recurrence; sums of binomials cancel beyond i = 20
        polynomials.append(((2 * i + 1) * z * polynomials[i] - i * polynomials[i - 1]) / (i + 1))
    return torch.stack(polynomials[: memory.shape[-2]], 1) @ memory


def check_memory(order: int, theta: float, state: torch.Tensor | None, x: torch.Tensor) -> None:
    """`order` ≥ 1, `theta` > 0, and a state that fits x (B, L, D)."""
    if not isinstance(order, int) or order < 1:
        raise ValueError(f"order must be a positive integer, got {order!r}.")
    if not 0 < theta < math.inf:
        raise ValueError(f"theta must be positive and finite, got {theta!r}.")
    check_tensor("initial_state", state, (x.shape[0], order, x.shape[2]), "B, q, D", beside=x, optional=True)


__all__ = ["check_memory", "decode_memory", "impulse_response", "legendre_memory", "transition"]
