"""The matrices of the Legendre Memory Unit, computed in float64 and cached per device and dtype.

They are functions of (order, theta) alone, so they belong to no module: casting a module, creating it on the meta
device or loading a checkpoint cannot change them.
"""

from typing import NamedTuple

import torch

from hf_hybrid_ssm.ops.core.constants import constant

NEGLIGIBLE = 2.0**-26  # what the taps left out may add up to, of all of them: a quarter of float32's rounding


class BlockOperators(NamedTuple):
    """What blocks of C tokens need.

    Args:
        advance: (q, q) A^C.
        push: (q, C) [A^{C-1} B, ..., A B, B], what a block's inputs leave in the state after it.
        powers: (q, C, q), `powers[:, j]` is A^{j+1}.
        impulse: (q, C), column k is A^k B.
    """

    advance: torch.Tensor
    push: torch.Tensor
    powers: torch.Tensor
    impulse: torch.Tensor


@constant
def transition(order: int, theta: float) -> torch.Tensor:
    """(q, q) exp(A) in float64 on CPU, A_ij = (2i+1)/theta · (-1 if i < j else (-1)^(i-j+1)): one token's step."""
    i = torch.arange(order, dtype=torch.float64)
    sign = torch.where((i[:, None] - i) % 2 == 0, -1.0, 1.0)
    matrix = (2 * i[:, None] + 1) / theta * torch.where(i[:, None] < i, -1.0, sign)
    return torch.linalg.matrix_exp(matrix)


@constant
def block_operators(order: int, theta: float, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """`BlockOperators` for blocks of `block` tokens, in `dtype`."""
    step = transition(order, theta)
    powers = [step]
    for _ in range(block - 1):
        powers.append(powers[-1] @ step)
    stacked = torch.stack(powers, 1)  # (q, C, q)
    # B = (1 - A) e_0, so that a constant input c is remembered as c e_0 exactly
    first = torch.cat([torch.eye(order, dtype=torch.float64)[:, :1], stacked[:, :, 0]], 1)  # A^k e_0, k = 0 … C
    impulse = first[:, :-1] - first[:, 1:]
    parts = (powers[-1], impulse.flip(1), stacked, impulse)
    return tuple(part.to(dtype).contiguous() for part in parts)


@constant
def doubled_advances(order: int, theta: float, block: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(q, q) A^C, A^{2C}, A^{4C}, ... (`count` of them) for blocks of C tokens, in `dtype`."""
    powers = [torch.linalg.matrix_power(transition(order, theta), block)]
    for _ in range(count - 1):
        powers.append(powers[-1] @ powers[-1])
    return tuple(power.to(dtype) for power in powers)


def impulse_response(order: int, theta: float, length: int) -> torch.Tensor:
    """(q, length) float64 on CPU, column k is A^k B, by doubling."""
    power = transition(order, float(theta))
    columns = torch.eye(order, dtype=torch.float64)[:, :1]
    while columns.shape[1] < length + 1:
        columns = torch.cat([columns, power @ columns], 1)
        power = power @ power
    return columns[:, :length] - columns[:, 1 : length + 1]


@constant
def _finite_response(order: int, theta: float, horizon: int) -> torch.Tensor:
    response = impulse_response(order, theta, horizon)
    left = response.abs().flip(1).cumsum(1).flip(1)  # from each tap on
    count = int((left > NEGLIGIBLE * left[:, :1]).any(0).sum())
    return response[:, :count].float()


def finite_response(order: int, theta: float, length: int) -> torch.Tensor:
    """(q, T) float32 on CPU: `impulse_response` up to the tap from which on float32 sees none, T <= length."""
    horizon = 2 ** max(5, (length - 1).bit_length())  # the same for many lengths
    return _finite_response(order, float(theta), horizon)[:, :length]
