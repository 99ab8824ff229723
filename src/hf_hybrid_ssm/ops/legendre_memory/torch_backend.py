"""The Legendre memory in blocks: within a block one matrix product, between blocks the state."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops._core.autocast import without_autocast
from hf_hybrid_ssm.ops._core.toeplitz import causal_toeplitz
from hf_hybrid_ssm.ops.legendre_memory.constants import BlockOperators, block_operators, step_matrix

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
            y = blocks.read_out(read_out_matrix(weight, blocks.operators), slice(None))
            y = y.view(x.shape[0], -1, weight.shape[0], x.shape[2])[:, : x.shape[1]]
            final = blocks.final_state(lengths)
        return y.to(x.dtype), final


def by_steps(x, weight, order, theta, state, lengths):
    """Token by token, for one or two of them: A (m - e_0 x) + e_0 x is A m + B x."""
    a = step_matrix(order, theta, x.dtype, x.device)
    m = x.new_zeros(x.shape[0], order, x.shape[2]) if state is None else state.to(x.dtype)
    y = []
    for t in range(x.shape[1]):
        u = F.pad(x[:, t, None], (0, 0, 0, order - 1))
        after = a @ (m - u) + u
        m = after if lengths is None else torch.where((t < lengths)[:, None, None], after, m)
        y.append(weight @ m)
    rows = torch.stack(y, 1) if y else x.new_zeros(x.shape[0], 0, weight.shape[0], x.shape[2])
    return rows, m


def read_out_matrix(weight: torch.Tensor, operators: BlockOperators) -> torch.Tensor:
    """[T | R], (C r, C + q): outputs of a block from its inputs and the state before it.

    Output j is W A^{j+1} s + Σ_{i ≤ j} (W A^{j-i} B) x_i.
    """
    rows, block = weight.shape[0], operators.impulse.shape[1]
    from_state = torch.tensordot(weight, operators.powers, 1).transpose(0, 1)  # (C, r, q)
    taps = weight @ operators.impulse  # (r, C)
    from_inputs = causal_toeplitz(taps).permute(2, 0, 1)  # (C, r, C)
    return torch.cat([from_inputs, from_state], 2).reshape(block * rows, -1)


class Blocks:
    """A sequence in blocks of C tokens, with the state before each.

    Args:
        x: (B, L, D) in the dtype of the computation.
        state: (B, q, D) before the first token, or None for zeros.
    """

    def __init__(self, x: torch.Tensor, order: int, theta: float, state: torch.Tensor | None, block: int = BLOCK):
        batch, length, channels = x.shape
        self.operators = BlockOperators(*block_operators(order, theta, block, x.dtype, x.device))
        self.order, self.block, self.length = order, block, length
        self.count = -(-length // block)
        self.x = F.pad(x, (0, 0, 0, self.count * block - length)).view(batch, self.count, block, channels)
        pushed = self.operators.push @ self.x  # (B, J, q, D)
        s = x.new_zeros(batch, order, channels) if state is None else state.to(x.dtype)
        states = []
        for push in pushed.unbind(1):  # not by index: the gradient of each index would be a whole tensor of zeros
            states.append(s)
            s = torch.baddbmm(push, self.operators.advance.expand(batch, -1, -1), s)
        self.states = torch.stack(states, 1)  # (B, J, q, D)
        self.after = s

    def read_out(self, matrix: torch.Tensor, which: slice) -> torch.Tensor:
        """(B, J', C r, D): all outputs of the blocks `which`."""
        return matrix @ torch.cat([self.x[:, which], self.states[:, which]], 2)

    def final_state(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """(B, q, D) after each row's last real token."""
        if lengths is None and self.length == self.count * self.block:
            return self.after
        batch = self.x.shape[0]
        if lengths is None:
            lengths = torch.full((batch,), self.length, device=self.x.device)
        index = torch.clamp(lengths // self.block, max=self.count - 1)
        tokens = lengths - index * self.block  # of the block that is not finished, 0 … C
        rows = torch.arange(batch, device=self.x.device)
        s, x = self.states[rows, index], self.x[rows, index]
        lag = tokens.unsqueeze(1) - 1 - torch.arange(self.block, device=self.x.device)  # (B, C)
        push = torch.where(lag >= 0, self.operators.impulse[:, lag.clamp(min=0)], 0.0)  # (q, B, C)
        real = torch.where((lag >= 0).unsqueeze(2), x, 0.0)  # nothing after a row's end may reach its state
        power = self.operators.powers[:, (tokens - 1).clamp(min=0)].transpose(0, 1)  # (B, q, q)
        advanced = torch.where((tokens > 0)[:, None, None], power @ s, s)
        return advanced + push.transpose(0, 1) @ real
