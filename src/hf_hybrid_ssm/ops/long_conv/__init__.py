"""Long convolution of every channel with its own filter: y = K * u + D u, causal or two-sided."""

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.core.output_positions import OutputPositions
from hf_hybrid_ssm.ops.core.padding import last_inputs, zero_beyond
from hf_hybrid_ssm.ops.core.rows import PLAIN_ROWS, Rows, checked_rows
from hf_hybrid_ssm.ops.core.transforms import without_autocast
from hf_hybrid_ssm.ops.long_conv.reference import EXAMPLES, ConvInputs, long_conv_reference
from hf_hybrid_ssm.ops.long_conv.torch_backend import long_conv_torch, sampled

_OP = Op(
    "long_conv",
    builtin={"torch": long_conv_torch, "reference": long_conv_reference},
    kernels={"triton": "hf_hybrid_ssm.ops.long_conv.triton"},
    examples=EXAMPLES,
)


def long_conv(
    u: torch.Tensor,
    kernel: torch.Tensor,
    *,
    future_kernel: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    rows: Rows = PLAIN_ROWS,
    initial_state: torch.Tensor | None = None,
    stride: int | None = None,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Convolve each channel with a filter as long as the sequence, or longer.

        y_t = \sum_{k \ge 0} K_k u_{t-k} + \sum_{k \ge 1} F_{k-1} u_{t+k} + D u_t

    Args:
        u: (B, L, D), any floating dtype. Computed in float32, float64 if u or the kernel is float64.
        kernel: (G, K) or (F, G, K) taps of lags 0..K-1. G divides D: channel c uses filter c // (D / G). With F given,
            every channel has F filters and y is (B, L, F, D).
        future_kernel: like `kernel` with any number of taps, of lags -1, -2, ...: the two-sided form. None is causal.
        skip: (D,) or (F, D), the weight of the token itself; None leaves the term out.
        rows: how the rows are read; padding is not read. The final state is the last K - 1 inputs of the row's last
            document (causal only).
        initial_state: (B, K-1, D) the K - 1 inputs before this piece, oldest first (zeros: the start of a sequence).
        stride: give y only at the tokens stride - 1, 2 stride - 1, ...; causal ones are then contracted one by one.
        positions: (B, J) int64, give y only at these tokens of each row (0..L-1), likewise.

    Returns:
        y (B, L, [F,] D), or (B, L // stride, [F,] D), or (B, J, [F,] D), in u's dtype, and the final state (B, K-1, D)
        in the computing dtype or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    batch, length, channels = _check(u, kernel, future_kernel)
    seq_idx, lengths = checked_rows(rows, batch, length)
    wanted = OutputPositions.of(stride, positions, batch, length)
    dtype = torch.float64 if torch.float64 in (u.dtype, kernel.dtype) else torch.float32
    filters = _expand(kernel, channels).to(dtype)
    future = None if future_kernel is None else _expand(future_kernel, channels).to(dtype)
    if skip is not None:
        check_tensor("skip", skip, (channels,) if kernel.dim() == 2 else (filters.shape[0], channels), "[F,] D")
        skip = skip.to(dtype).view(-1, channels)
    past = kernel.shape[-1] - 1
    check_tensor("initial_state", initial_state, (batch, past, channels), "B, K-1, D", optional=True)
    if future is not None and (initial_state is not None or rows.return_final_state):
        raise ValueError("initial_state and rows.return_final_state need a causal convolution, got a future_kernel.")
    run = _OP.select(u.device.type, u.dtype, backend)
    with without_autocast(u.device.type):
        x = zero_beyond(u, lengths)
        history = filters.new_zeros(batch, 0, channels) if initial_state is None else initial_state.to(dtype)
        if wanted.is_all or future is not None:
            y = wanted.take(run(ConvInputs(x, filters, future, skip, history, seq_idx))[0])
        else:
            y = sampled(ConvInputs(x.to(dtype), filters, None, skip, history, seq_idx), wanted)
        final = (
            last_inputs(x.to(dtype), past + 1, initial_state, seq_idx, lengths) if rows.return_final_state else None
        )
    return (y.squeeze(2) if kernel.dim() == 2 else y).to(u.dtype), final


def _check(u: torch.Tensor, kernel: torch.Tensor, future_kernel: torch.Tensor | None) -> tuple[int, int, int]:
    check_tensor("u", u, (None, None, None), "B, L, D")
    if not u.is_floating_point():
        raise TypeError(f"u must be floating point, got {u.dtype}.")
    for name, value in (("kernel", kernel), ("future_kernel", future_kernel)):
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() not in (2, 3):
            raise ValueError(f"{name} must be a tensor (G, K) or (F, G, K), got {getattr(value, 'shape', value)!r}.")
        if value.shape[-2] < 1 or u.shape[2] % value.shape[-2]:
            raise ValueError(
                f"{name} has {value.shape[-2]} filters, which must divide the {u.shape[2]} channels of u."
            )
    if kernel.shape[-1] < 1:
        raise ValueError("kernel must have at least one tap (lag 0), got 0.")
    if future_kernel is not None and future_kernel.shape[:-2] != kernel.shape[:-2]:
        raise ValueError(f"future_kernel must have as many filters as kernel, got {tuple(future_kernel.shape)}.")
    return u.shape[0], u.shape[1], u.shape[2]


def _expand(kernel: torch.Tensor, channels: int) -> torch.Tensor:
    """(G, K) or (F, G, K) -> (F, D, K): each of the G filters serves D / G neighbouring channels."""
    kernel = kernel.unsqueeze(0) if kernel.dim() == 2 else kernel
    return kernel.repeat_interleave(channels // kernel.shape[1], dim=1) if kernel.shape[1] != channels else kernel
