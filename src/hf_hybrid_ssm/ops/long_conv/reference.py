"""The long convolution, term by term: the equation itself, quadratic in the length."""

from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops.core.self_check import draw


class ConvInputs(NamedTuple):
    """What implementations of `long_conv` take, checked.

    Args:
        u: (B, L, D).
        kernel, future_kernel: (F, D, K) each; they, skip and history are in the dtype of the computation.
        skip: (F, D).
        history: (B, H, D), inputs before the row.
        seq_idx: (B, L).
    """

    u: torch.Tensor
    kernel: torch.Tensor
    future_kernel: torch.Tensor | None
    skip: torch.Tensor | None
    history: torch.Tensor
    seq_idx: torch.Tensor | None = None


def long_conv_reference(inputs: ConvInputs) -> tuple[torch.Tensor]:
    """y_t = sum_{k>=0} K_k u_{t-k} + sum_{k>=1} F_{k-1} u_{t+k} + D u_t, over the tokens of t's document.

    One row and one pair of positions at a time: y (B, L, F, D).
    """
    u, kernel, future_kernel, skip, history, seq_idx = inputs
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
    return (torch.stack(by_row) if by_row else u.new_zeros(0, length, kernel.shape[0], u.shape[2]),)


def _example(length: int, system: tuple[int, int], taps: int, future: int, past: int, batch: int = 1) -> ConvInputs:
    shapes = {"u": (batch, length, system[1]), "history": (batch, past, system[1]), "skip": system}
    return ConvInputs(**draw(shapes | {"kernel": (*system, taps), "future_kernel": (*system, future)}))


EXAMPLES = (
    lambda: _example(90, (2, 3), 70, 20, 5, batch=2),  # longer than a tile, two filters, both directions
    # a multiple of 16 tokens and filters of as many taps, so that rows begin at multiples of 16 bytes
    lambda: _example(48, (1, 2), 32, 16, 16),
)
