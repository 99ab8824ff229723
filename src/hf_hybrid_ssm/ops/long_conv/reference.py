"""The long convolution, term by term: the equation itself, quadratic in the length."""

import torch

from hf_hybrid_ssm.ops.core.self_check import draw


def long_conv_reference(
    u: torch.Tensor,
    kernel: torch.Tensor,
    future_kernel: torch.Tensor | None,
    skip: torch.Tensor | None,
    history: torch.Tensor,
    seq_idx: torch.Tensor | None,
) -> torch.Tensor:
    """y_t = sum_{k>=0} K_k u_{t-k} + sum_{k>=1} F_{k-1} u_{t+k} + D u_t, over the tokens of t's document.

    Shapes as in `long_conv_torch`. One row and one pair of positions at a time.
    """
    u = u.to(kernel.dtype)
    batch, length, _ = u.shape
    past = history.shape[1]
    by_row = []
    for b in range(batch):
        tokens = torch.cat([history[b], u[b]])
        documents = [0] * (past + length)
        if seq_idx is not None:
            documents = [int(seq_idx[b, 0])] * past + seq_idx[b].tolist() if length else documents
        outputs = []
        for t in range(past, past + length):
            y = u.new_zeros(kernel.shape[0], u.shape[2])
            for j in range(past + length):
                lag = t - j
                if documents[j] != documents[t]:
                    continue
                if 0 <= lag < kernel.shape[-1]:
                    y = y + kernel[..., lag] * tokens[j]
                elif lag < 0 and future_kernel is not None and -lag - 1 < future_kernel.shape[-1]:
                    y = y + future_kernel[..., -lag - 1] * tokens[j]
            if skip is not None:
                y = y + skip * tokens[t]
            outputs.append(y)
        by_row.append(torch.stack(outputs) if outputs else u.new_zeros(0, kernel.shape[0], u.shape[2]))
    return torch.stack(by_row) if by_row else u.new_zeros(0, length, kernel.shape[0], u.shape[2])


def self_check_inputs() -> dict:
    """Longer than a tile, two filters, both directions."""
    shapes = {"u": (2, 90, 3), "kernel": (2, 3, 70), "future_kernel": (2, 3, 20), "skip": (2, 3), "history": (2, 5, 3)}
    return draw(shapes) | {"seq_idx": None}


def aligned_self_check_inputs() -> dict:
    """Rows of a multiple of 16 tokens and filters of as many taps, so that they begin at multiples of 16 bytes."""
    shapes = {
        "u": (1, 48, 2),
        "kernel": (1, 2, 32),
        "future_kernel": (1, 2, 16),
        "skip": (1, 2),
        "history": (1, 16, 2),
    }
    return draw(shapes) | {"seq_idx": None}
