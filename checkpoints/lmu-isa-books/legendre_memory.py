# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 514e89dfb7719f25f56a3d16099866e0be37c4761f5316187db60b6dd9730e83

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

from .dispatch import (
    Op, causal_toeplitz, check_lengths, check_seq_idx, check_tensor, is_transforming, run_by_document, without_autocast,
)


# ---- ops/legendre_memory/constants.py -------------------------------------------------------------------------------
# The matrices of the Legendre Memory Unit, computed in float64 and cached per device and dtype.
#
# They are functions of (order, theta) alone, so they belong to no module: casting a module, creating it on the meta
# device or loading a checkpoint cannot change them.

NEGLIGIBLE = 2.0**-26  # what the taps left out may add up to, of all of them: a quarter of float32's rounding
P = ParamSpec("P")
T = TypeVar("T")


def constant(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, computed once for the same arguments; to `torch.compile` the result is a constant.

    Whatever is active where it is first needed (a trace, inference mode, a transform), all may use it.
    """

    @lru_cache
    def kept(*arguments: P.args, **options: P.kwargs) -> T:
        outside = (_disable_current_modes(), torch._C._DisableFuncTorch(), torch.inference_mode(False))
        with ExitStack() as stack:
            for context in (*outside, torch.device("cpu"), torch.no_grad()):
                stack.enter_context(context)
            return make(*arguments, **options)

    @torch.compiler.assume_constant_result
    def get(*arguments: P.args, **options: P.kwargs) -> T:
        return kept(*arguments, **options)  # type: ignore[arg-type]

    return get


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
def block_operators(
    order: int, theta: float, block: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """`BlockOperators` for blocks of `block` tokens, in `dtype` on `device`."""
    step = transition(order, theta)
    powers = [step]
    for _ in range(block - 1):
        powers.append(powers[-1] @ step)
    stacked = torch.stack(powers, 1)  # (q, C, q)
    # B = (1 - A) e_0, so that a constant input c is remembered as c e_0 exactly
    first = torch.cat([torch.eye(order, dtype=torch.float64)[:, :1], stacked[:, :, 0]], 1)  # A^k e_0, k = 0 … C
    impulse = first[:, :-1] - first[:, 1:]
    parts = (powers[-1], impulse.flip(1), stacked, impulse)
    return tuple(part.to(device, dtype).contiguous() for part in parts)


@constant
def doubled_advances(
    order: int, theta: float, block: int, count: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """(q, q) A^C, A^{2C}, A^{4C}, ... (`count` of them) for blocks of C tokens, in `dtype` on `device`."""
    powers = [torch.linalg.matrix_power(transition(order, theta), block)]
    for _ in range(count - 1):
        powers.append(powers[-1] @ powers[-1])
    return tuple(power.to(device, dtype) for power in powers)


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


# ---- ops/legendre_memory/reference.py -------------------------------------------------------------------------------
# The Legendre memory, token by token: m_t = A m_{t-1} + B x_t with A = exp of the continuous matrix, B = (1 - A)
# e_0.

def legendre_memory_reference(x, *, weight, order, theta, state, lengths):
    """See `hf_hybrid_ssm.ops.legendre_memory.legendre_memory`; computes in float32, or float64 for float64 inputs."""
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
    rows = order if weight is None else weight.shape[0]
    stacked = torch.stack(y, 1) if y else x.new_zeros(x.shape[0], 0, rows, x.shape[2])
    return stacked.to(x.dtype), m


# ---- ops/legendre_memory/torch_backend.py ---------------------------------------------------------------------------
# The Legendre memory in blocks: within a block one matrix product, between blocks the state.

BLOCK = 32


def legendre_memory_torch(x, *, weight, order, theta, state, lengths):
    """See `hf_hybrid_ssm.ops.legendre_memory.legendre_memory`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = torch.eye(order, dtype=dtype, device=x.device) if weight is None else weight.to(dtype)
    with without_autocast(x.device.type):
        if x.shape[1] <= 2:
            y, final = by_steps(x.to(dtype), weight, order, theta, state, lengths)
        else:
            blocks = Blocks(x.to(dtype), order, theta, state)
            from_inputs, from_state = read_out_matrices(weight, blocks.operators)
            y = read_out(from_inputs, from_state, blocks.x.flatten(0, 1), blocks.states.flatten(0, 1))
            y = y.view(x.shape[0], -1, weight.shape[0], x.shape[2])[:, : x.shape[1]]
            final = blocks.final_state(lengths)
        return y.to(x.dtype), final


def by_steps(x, weight, order, theta, state, lengths):
    """Token by token, for one or two of them: m ← A m + B x."""
    a, b, *_ = block_operators(order, theta, 1, x.dtype, x.device)
    m = x.new_zeros(x.shape[0], order, x.shape[2]) if state is None else state.to(x.dtype)
    y = []
    for t in range(x.shape[1]):
        after = product(a, m, b * x[:, t, None])
        m = after if lengths is None else torch.where((t < lengths)[:, None, None], after, m)
        y.append(product(weight, m))
    rows = torch.stack(y, 1) if y else x.new_zeros(x.shape[0], 0, weight.shape[0], x.shape[2])
    return rows, m


def read_out_matrices(weight: torch.Tensor, operators: BlockOperators) -> tuple[torch.Tensor, torch.Tensor]:
    """T (C r, C) and R (C r, q): outputs of a block from its inputs, and from the state before it.

    Output j is W A^{j+1} s + Σ_{i ≤ j} (W A^{j-i} B) x_i.
    """
    from_state = torch.tensordot(weight, operators.powers, 1).transpose(0, 1)  # (C, r, q)
    from_inputs = causal_toeplitz(weight @ operators.impulse).permute(2, 0, 1)  # (C, r, C)
    return from_inputs.flatten(0, 1), from_state.flatten(0, 1)


def product(matrix: torch.Tensor, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """matrix (m, k) times each of x (n, k, D), plus (n, m, D): one batched product, whose results lie row by row."""
    matrix = matrix.expand(x.shape[0], -1, -1)
    return torch.bmm(matrix, x) if added is None else torch.baddbmm(added, matrix, x)


def read_out(
    from_inputs: torch.Tensor, from_state: torch.Tensor, x: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """(n, C r, D): outputs of blocks x (n, C, D) with the states (n, q, D) before them.

    The second product adds to the first in place: copies of this size cost more than the smaller product.
    """
    if is_transforming():  # vmap has no rule for the product in place
        return product(from_inputs, x, product(from_state, states))
    return product(from_state, states).baddbmm_(from_inputs.expand(x.shape[0], -1, -1), x)


def states_between(
    push: torch.Tensor, state: torch.Tensor, advances: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """s_{j+1} = A^C s_j + push_j: the states before each block (B, J, q, D), and the one after the last.

    By pairs of blocks, then pairs of pairs: as many products as log2 J takes instead of one after the other.
    """
    count, shape = push.shape[1], state.shape[1:]
    if count == 1:
        return state.unsqueeze(1), product(advances[0], state, push[:, 0])
    if count % 2:
        states, last = states_between(push[:, :-1], state, advances)
        return torch.cat([states, last.unsqueeze(1)], 1), product(advances[0], last, push[:, -1])
    first, second = (part.reshape(-1, *shape) for part in (push[:, 0::2], push[:, 1::2]))
    both = product(advances[0], first, second).view(-1, count // 2, *shape)
    even, after = states_between(both, state, advances[1:])
    odd = product(advances[0], even.reshape(-1, *shape), first).view_as(even)
    return torch.stack([even, odd], 2).flatten(1, 2), after


def advanced(state: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, operators: BlockOperators) -> torch.Tensor:
    """(B, q, D) the state after the first `tokens` (B,), 0 … C, of x (B, C, D)."""
    block = operators.impulse.shape[1]
    lag = tokens.unsqueeze(1) - 1 - torch.arange(block, device=x.device)  # (B, C)
    push = torch.where(lag >= 0, operators.impulse[:, lag.clamp(min=0)], 0.0)  # (q, B, C)
    real = torch.where((lag >= 0).unsqueeze(2), x, 0.0)  # nothing after a row's end may reach its state
    power = operators.powers[:, (tokens - 1).clamp(min=0)].transpose(0, 1)  # (B, q, q)
    kept = torch.where((tokens > 0)[:, None, None], power @ state, state)
    return kept + push.transpose(0, 1) @ real


class Blocks:
    """A sequence in blocks of C tokens, with the state before each.

    Args:
        x: (B, L, D) in the dtype of the computation.
        state: (B, q, D) before the first token, or None for zeros.
    """

    def __init__(self, x: torch.Tensor, order: int, theta: float, state: torch.Tensor | None, block: int = BLOCK):
        batch, length, channels = x.shape
        self.operators = BlockOperators(*block_operators(order, theta, block, x.dtype, x.device))
        self.block, self.length = block, length
        self.count = -(-length // block)
        self.x = F.pad(x, (0, 0, 0, self.count * block - length)).view(batch, self.count, block, channels)
        push = product(self.operators.push, self.x.flatten(0, 1)).view(batch, self.count, order, channels)
        state = x.new_zeros(batch, order, channels) if state is None else state.to(x.dtype)
        advances = doubled_advances(order, theta, block, self.count.bit_length(), x.dtype, x.device)
        self.states, self.after = states_between(push, state, advances)

    def final_state(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """(B, q, D) after each row's last real token."""
        if lengths is None and self.length == self.count * self.block:
            return self.after
        batch = self.x.shape[0]
        if lengths is None:
            lengths = torch.full((batch,), self.length, device=self.x.device)
        index = torch.clamp(lengths // self.block, max=self.count - 1)  # the block that is not finished
        rows = torch.arange(batch, device=self.x.device)
        tokens = lengths - index * self.block
        return advanced(self.states[rows, index], self.x[rows, index], tokens, self.operators)


# ---- ops/legendre_memory/__init__.py --------------------------------------------------------------------------------
# The Legendre Memory Unit: every channel's recent past as coefficients of Legendre polynomials.

_OP = Op("legendre_memory", builtin={"torch": legendre_memory_torch, "reference": legendre_memory_reference})


def legendre_memory(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    order: int,
    theta: float,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""m_t = A m_{t-1} + B x_t for each channel (Voelker et al., 2019; zero-order hold), and y_t = W m_t.

    Row i of m_t is the coefficient of the i-th shifted Legendre polynomial over the last `theta` tokens.

    Args:
        x: (B, L, D).
        weight: W (r, q), what to read from the memory; None for all of it.
        order: q, number of polynomials.
        theta: window, in tokens.
        initial_state: (B, q, D) memory before the first token; of the row's first document.
        seq_idx: (B, L) int, documents of a packed row; the memory is empty before each.
        lengths: (B,) int, real tokens at the front of each row; outputs after them are meaningless but finite, and
            the final state is the one after them.
        return_final_state: also return the memory.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, L, r, D) (r = q without `weight`) in x's dtype, and the memory (B, q, D), float32 or wider, or None.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device, or a sequence without end.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    check_tensor("weight", weight, (None, order), "r, q", optional=True)
    check_memory(order, theta, initial_state, x)
    check_seq_idx(seq_idx, x.shape[0], x.shape[1])
    check_lengths(lengths, x.shape[0], x.shape[1])
    implementation = _OP.select(x.device.type, x.dtype, backend)
    run = partial(implementation, weight=weight, order=order, theta=float(theta))
    y, final = run_by_document(run, x, initial_state, seq_idx, lengths)
    return y, final if return_final_state else None


def check_memory(order: int, theta: float, state: torch.Tensor | None, x: torch.Tensor) -> None:
    """`order` ≥ 1, `theta` > 0, and a state that fits x (B, L, D)."""
    if not isinstance(order, int) or order < 1:
        raise ValueError(f"order must be a positive integer, got {order!r}.")
    if not 0 < theta < math.inf:
        raise ValueError(f"theta must be positive and finite, got {theta!r}.")
    check_tensor("initial_state", state, (x.shape[0], order, x.shape[2]), "B, q, D", optional=True)
