"""The Legendre memory in blocks: within a block one matrix product, between blocks the state."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.blocks import causal_toeplitz
from hf_hybrid_ssm.ops.core.transforms import is_transforming, without_autocast
from hf_hybrid_ssm.ops.legendre_memory.constants import (
    BlockOperators,
    block_operators,
    doubled_advances,
)
from hf_hybrid_ssm.ops.legendre_memory.reference import MemoryInputs

BLOCK = 32


def legendre_memory_torch(inputs: MemoryInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.legendre_memory.legendre_memory`."""
    x, weight, order, theta, state, lengths = inputs
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = torch.eye(order, dtype=dtype, device=x.device) if weight is None else weight.to(dtype)
    with without_autocast(x.device.type):
        if x.shape[1] <= 2:
            y, final = by_steps(inputs._replace(x=x.to(dtype), weight=weight))
        else:
            blocks = Blocks(x.to(dtype), order, theta, state)
            from_inputs, from_state = read_out_matrices(weight, blocks.operators)
            y = read_out(from_inputs, from_state, blocks.x.flatten(0, 1), blocks.states.flatten(0, 1))
            tokens = blocks.x.shape[1] * blocks.x.shape[2]
            y = y.view(x.shape[0], tokens, weight.shape[0], x.shape[2])[:, : x.shape[1]]
            final = blocks.final_state(lengths)
        return y.to(x.dtype), final


def by_steps(inputs: MemoryInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, for one or two of them: m ← A m + B x."""
    x, weight, order, theta, state, lengths = inputs
    assert weight is not None
    a, b, *_ = block_operators(order, theta, 1, x.dtype, device=x.device)
    m = x.new_zeros(x.shape[0], order, x.shape[2]) if state is None else state.to(x.dtype)
    y = []
    for t in range(x.shape[1]):
        after = product(a, m, b * x[:, t, None])
        m = after if lengths is None else torch.where((t < lengths)[:, None, None], after, m)
        y.append(product(weight, m))
    stacked = torch.stack(y, 1) if y else x.new_zeros(x.shape[0], 0, weight.shape[0], x.shape[2])
    return stacked, m


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
    decayed = torch.where((tokens > 0)[:, None, None], power @ state, state)
    return decayed + push.transpose(0, 1) @ real


class Blocks:
    """A sequence in blocks of C tokens, with the state before each.

    Args:
        x: (B, L, D) in the dtype of the computation.
        state: (B, q, D) before the first token, or None for zeros.
    """

    def __init__(self, x: torch.Tensor, order: int, theta: float, state: torch.Tensor | None, block: int = BLOCK):
        batch, length, channels = x.shape
        self.operators = BlockOperators(*block_operators(order, theta, block, x.dtype, device=x.device))
        self.block, self.length = block, length
        self.count = -(-length // block)
        self.x = F.pad(x, (0, 0, 0, self.count * block - length)).view(batch, self.count, block, channels)
        push = product(self.operators.push, self.x.flatten(0, 1)).view(batch, self.count, order, channels)
        state = x.new_zeros(batch, order, channels) if state is None else state.to(x.dtype)
        advances = doubled_advances(order, theta, block, self.count.bit_length(), x.dtype, device=x.device)
        self.states, self.after = states_between(push, state, advances)

    def final_state(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """(B, q, D) after each row's last real token."""
        if lengths is None and self.length == self.count * self.block:
            return self.after
        batch = self.x.shape[0]
        if lengths is None:
            lengths = torch.full((batch,), self.length, device=self.x.device)
        index = torch.clamp(lengths // self.block, max=self.count - 1)  # the block that is not finished
        row = torch.arange(batch, device=self.x.device)
        tokens = lengths - index * self.block
        return advanced(self.states[row, index], self.x[row, index], tokens, self.operators)
