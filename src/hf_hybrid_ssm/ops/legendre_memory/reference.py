"""The Legendre memory, token by token: m_t = A m_{t-1} + B x_t with A = exp of the continuous matrix, B = (1 - A)
e_0."""

from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops.legendre_memory.constants import transition


class MemoryInputs(NamedTuple):
    """What implementations of `legendre_memory` take, checked; every row is one document, and padding is 0."""

    x: torch.Tensor
    weight: torch.Tensor | None
    order: int
    theta: float
    state: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


def legendre_memory_reference(inputs: MemoryInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.legendre_memory.legendre_memory`; computes in float32, or float64 for float64 inputs."""
    x, weight, order, theta, state, lengths = inputs
    dtype = torch.promote_types(x.dtype, torch.float32)
    a = transition(order, theta).to(x.device, dtype)
    b = -a[:, :1]
    b[0] += 1
    m = x.new_zeros(x.shape[0], order, x.shape[2], dtype=dtype) if state is None else state.to(dtype)
    y = []
    for t in range(x.shape[1]):
        after = a @ m + b * x[:, t, None].to(dtype)
        real = torch.ones_like(x[:, 0, 0], dtype=torch.bool) if lengths is None else t < lengths
        m = torch.where(real[:, None, None], after, m)
        y.append(m if weight is None else weight.to(dtype) @ m)
    size = order if weight is None else weight.shape[0]
    stacked = torch.stack(y, 1) if y else x.new_zeros(x.shape[0], 0, size, x.shape[2])
    return stacked.to(x.dtype), m
