"""`lti_scan` in block form: products inside of blocks, a scan over borders."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.blocks import causal_toeplitz, document_before_block, document_blocks, power_of_two
from hf_hybrid_ssm.ops.core.output_positions import OutputPositions
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.rows import Documents, Rows
from hf_hybrid_ssm.ops.linear_scan.diagonal import diagonal_scan
from hf_hybrid_ssm.ops.linear_scan.reference import LtiInputs
from hf_hybrid_ssm.ops.linear_scan.transition import Transition, power
from hf_hybrid_ssm.ops.long_conv.fft import channels_first, channels_last
from hf_hybrid_ssm.ops.long_conv.torch_backend import block_conv

BLOCK = 64  # tokens, where nobody says otherwise


class BlockStates(NamedTuple):
    """What takes a block of w tokens of D channels into the states of F filters (see `block_states`)."""

    transition: Transition  # A
    power: Transition  # A^w
    output: torch.Tensor  # (F, D, N): C
    input_to_state: torch.Tensor  # (D, w, F N): A^{w-1-p} B, token p of a block into the state at its end

    @property
    def block(self) -> int:
        """w, a power of two."""
        return self.input_to_state.shape[1]

    def to(self, dtype: torch.dtype) -> "BlockStates":
        """Rounded to `dtype`; the power of a diagonal is scanned in its own precision."""
        power = self.power if self.power.form != "dense" else self.power.to(dtype)
        return BlockStates(self.transition.to(dtype), power, self.output.to(dtype), self.input_to_state.to(dtype))


class BlockOutputs(NamedTuple):
    """What gives the outputs inside of a block (see `block_outputs`)."""

    kernel: torch.Tensor  # (F, D, w): C A^j B
    state_to_output: torch.Tensor  # (F, D, w, N): C A^{j+1}
    intra_block: torch.Tensor  # (D, w, F w): the kernel as a Toeplitz matrix, token p of a block to its outputs

    def to(self, dtype: torch.dtype) -> "BlockOutputs":
        return BlockOutputs(*(part.to(dtype) for part in self))


class BlockMatrices(NamedTuple):
    """Both, made (or taken from a cache) when they are asked for: outputs at the borders of blocks need the states
    alone, which are a fraction of it all where there are many filters."""

    states: Callable[[], BlockStates]
    outputs: Callable[[], BlockOutputs]


def block_states(transition: Transition, vector: torch.Tensor, output: torch.Tensor, block: int) -> BlockStates:
    """Of A, B (F, D, N) and C (F, D, N), for blocks of `block` tokens, a power of two."""
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}.")
    if transition.form == "dense":
        krylov, last = transition.krylov_by_doubling(vector.unsqueeze(-2), block)
    else:
        krylov, last = transition.krylov(vector, block), transition.power(block)
    input_to_state = krylov.flip(-2).permute(1, 2, 0, 3).flatten(2)
    return BlockStates(transition, last, output, input_to_state)


def block_outputs(transition: Transition, vector: torch.Tensor, output: torch.Tensor, block: int) -> BlockOutputs:
    """The same system's."""
    if transition.form == "dense":
        shifted = transition.to(vector.dtype).apply(output.unsqueeze(-2), transposed=True)
        state_to_output = transition.krylov_by_doubling(shifted, block, transposed=True)[0]
    else:
        state_to_output = transition.krylov(output, block, start=1, transposed=True)
    kernel = long_kernel(transition, vector, output, block)
    return BlockOutputs(kernel, state_to_output, causal_toeplitz(kernel).permute(1, 2, 0, 3).flatten(2))


def long_kernel(transition: Transition, vector: torch.Tensor, output: torch.Tensor, length: int) -> torch.Tensor:
    """K_0 .. K_{length-1}, (F, D, length): one product of the rows C A^{iw} with the vectors A^j B, j < w.

    w is a power of two near the root of the length, so that both tables are small.
    """
    block = 1
    while block * block < length:
        block *= 2
    steps = -(-length // block)
    if transition.form == "dense":
        krylov, power = transition.krylov_by_doubling(vector.unsqueeze(-2), block)
        rows = power.krylov_by_doubling(output.unsqueeze(-2), power_of_two(steps), transposed=True)[0][..., :steps, :]
    else:
        krylov, rows = transition.krylov(vector, block), transition.krylov(output, steps, step=block, transposed=True)
    return torch.matmul(rows, krylov.mT).flatten(-2)[..., :length]


def lti_scan_torch(inputs: LtiInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y (B, L, F, D) in u's dtype and the final state (B, F, D, N)."""
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, form, returns_state, wanted, blocks = inputs
    x = zero_beyond(u.to(output.dtype), lengths)
    batch, length, channels = x.shape
    filters, _, size = output.shape
    is_fresh = initial_state is None
    if initial_state is None:
        initial_state = x.new_zeros(batch, filters, channels, size)
    if length == 0 or batch == 0:
        y = u.new_zeros(batch, wanted.count(length), filters, channels)
        return y, initial_state if returns_state else None
    if blocks is None:
        matrices = (Transition(decay, form), vector, output, BLOCK)
        blocks = BlockMatrices(lambda: block_states(*matrices), lambda: block_outputs(*matrices))
    system, added = blocks.states(), 0
    asks_for_none = wanted.stride is not None and wanted.stride > length
    if is_fresh and lengths is None and (wanted.is_all or asks_for_none):
        x, seq_idx, added = _ending_a_block(x, seq_idx, system.block)
    number = -(-x.shape[1] // system.block)
    gap = number * system.block - x.shape[1]
    tokens = channels_first(F.pad(x, (0, 0, 0, gap)) if gap else x).view(channels, batch, number, system.block)
    documents = document_blocks(seq_idx, system.block)
    starts = _block_starts(tokens, system, initial_state, documents)  # (F, D, B, n + 1, N)
    if asks_for_none:
        y = x.new_zeros(batch, 0, filters, channels)
    elif wanted.positions is None:
        y = _outputs(tokens, system, blocks.outputs, starts, documents, x.shape[1], wanted)
    else:
        states = _states_after(x, system, starts, seq_idx, wanted.positions + 1)  # (F, D, B, J, N)
        y = _read_out(states, system)
    if skip is not None and not asks_for_none:
        y = torch.addcmul(y, skip, wanted.take(x).unsqueeze(2))
    final = _final_state(x, system, starts, seq_idx, lengths) if returns_state else None
    return y[:, added:].to(u.dtype), final


def _ending_a_block(
    x: torch.Tensor, seq_idx: torch.Tensor | None, block: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """x (B, L, D) behind zeros, so that the last token ends a block; its documents, and the number of zeros. They
    change nothing before the first token of a row without a state."""
    added = -(-x.shape[1] // block) * block - x.shape[1]
    if added == 0:
        return x, seq_idx, 0
    if seq_idx is not None:
        seq_idx = torch.cat([seq_idx[:, :1].expand(-1, added), seq_idx], dim=1)
    return F.pad(x, (0, 0, added, 0)), seq_idx, added


def _read_out(states: torch.Tensor, system: BlockStates) -> torch.Tensor:
    """C s of states (F, D, B, J, N): (B, J, F, D)."""
    return torch.matmul(states, system.output[:, :, None, :, None]).squeeze(-1).permute(2, 3, 0, 1)


def _block_starts(
    tokens: torch.Tensor, system: BlockStates, initial_state: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """The states at every block's start and after the last block, (F, D, B, n + 1, N)."""
    channels, batch, blocks, block = tokens.shape
    filters, _, size = system.output.shape
    first, ends = initial_state, None
    if documents is not None:  # the end of a block knows of its last document only
        ends = documents[..., -1]
        tokens = torch.where(documents == ends.unsqueeze(-1), tokens, 0.0)
        first = torch.where((documents[:, 0, 0] == ends[:, 0]).view(-1, 1, 1, 1), initial_state, 0.0)
    inputs = torch.bmm(tokens.reshape(channels, batch * blocks, block), system.input_to_state)
    inputs = inputs.view(channels, batch, blocks, filters, size).permute(1, 2, 3, 0, 4)  # (B, n, F, D, N)
    if blocks == 1:
        after = system.power.apply(first.unsqueeze(-2)).squeeze(-2).to(first.dtype).unsqueeze(1) + inputs
    elif system.power.form == "dense":
        after = _dense_scan(system.power, inputs, first, ends)
    else:
        numbers = (_numbers(part, system.power.form) for part in (inputs, first))
        x, start = (part.flatten(-3) for part in numbers)
        rows = Rows(documents=None if ends is None else Documents(ends))
        h, _ = diagonal_scan(system.power.diagonal().flatten(), x, rows=rows, initial_state=start)
        after = (torch.view_as_real(h) if h.is_complex() else h).reshape(inputs.shape)
    return torch.cat([initial_state.unsqueeze(1), after], dim=1).permute(2, 3, 0, 1, 4)


def _numbers(states: torch.Tensor, form: str) -> torch.Tensor:
    """Real states (..., N) as they are, or as N / 2 complex numbers."""
    return torch.view_as_complex(states.contiguous().unflatten(-1, (-1, 2))) if form == "complex" else states


def _dense_scan(
    step: Transition, inputs: torch.Tensor, first: torch.Tensor, documents: torch.Tensor | None
) -> torch.Tensor:
    """s_i = P s_{i-1} + x_i over blocks, (B, n, F, D, N), where P is `step`: in log n products, each adding what came
    1, 2, 4, ... blocks before."""
    batch, blocks = inputs.shape[:2]
    s = torch.cat([first.unsqueeze(1), inputs], dim=1).permute(2, 3, 0, 1, 4)  # (F, D, B, n + 1, N)
    if documents is not None:
        documents = torch.cat([documents[:, :1], documents], dim=1)
    distance = 1
    while distance <= blocks:
        earlier = step.apply(s[..., :-distance, :].flatten(2, 3)).unflatten(2, (batch, -1))
        if documents is not None:
            same = (documents[:, distance:] == documents[:, :-distance]).unsqueeze(-1)
            earlier = torch.where(same, earlier, 0.0)
        s = s + F.pad(earlier, (0, 0, distance, 0))
        distance *= 2
        if distance <= blocks:
            step = Transition(torch.matmul(step.value, step.value), step.form)
    return s[..., 1:, :].permute(2, 3, 0, 1, 4)


def _outputs(
    tokens: torch.Tensor,
    system: BlockStates,
    outputs: Callable[[], BlockOutputs],
    starts: torch.Tensor,
    documents: torch.Tensor | None,
    length: int,
    wanted: OutputPositions,
) -> torch.Tensor:
    """y (B, L, F, D), or its rows at every `wanted.stride`-th token."""
    channels, batch, blocks, block = tokens.shape
    filters, _, size = system.output.shape
    if wanted.stride is not None and wanted.stride % block == 0:
        blocks_apart = wanted.stride // block
        return _read_out(starts[..., blocks_apart::blocks_apart, :][..., : wanted.count(length), :], system)
    inside = outputs()
    flat = tokens.reshape(channels, batch * blocks, block)
    if documents is None:
        local = torch.bmm(flat, inside.intra_block).view(channels, batch * blocks, filters, block).permute(2, 0, 1, 3)
    else:
        rows = flat.transpose(0, 1)  # (B n, D, w)
        local = block_conv(rows, inside.kernel, None, documents.flatten(0, 1)).permute(1, 2, 0, 3)
    carried = torch.matmul(starts[..., :-1, :].reshape(filters, channels, -1, size), inside.state_to_output.mT)
    if documents is not None:
        carried = torch.where((documents == document_before_block(documents)).view(-1, block), carried, 0.0)
    y = (local + carried).reshape(filters, channels, batch, blocks * block)[..., :length]
    return channels_last(y if wanted.stride is None else y[..., wanted.stride - 1 :: wanted.stride])


def _final_state(
    u: torch.Tensor,
    system: BlockStates,
    starts: torch.Tensor,
    seq_idx: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The state (B, F, D, N) after each row's last real token: from its block's start through the tokens after it."""
    batch, length, _ = u.shape
    block = system.block
    if lengths is None and length % block == 0:
        return starts[..., -1, :].permute(2, 0, 1, 3)
    count = torch.full((batch,), length, device=u.device) if lengths is None else lengths.to(torch.int64)
    return _states_after(u, system, starts, seq_idx, count.unsqueeze(1)).squeeze(3).permute(2, 0, 1, 3)


def _states_after(
    u: torch.Tensor, system: BlockStates, starts: torch.Tensor, seq_idx: torch.Tensor | None, count: torch.Tensor
) -> torch.Tensor:
    """The states (F, D, B, J, N) after the first count (B, J) tokens of each row."""
    batch, _, channels = u.shape
    filters, _, size = system.output.shape
    block, number = system.block, count.shape[1]
    whole, rest = count // block, count % block
    index = whole.view(1, 1, batch, number, 1).expand(filters, channels, batch, number, size)
    state = starts.gather(3, index)
    # the last `rest` tokens, right-aligned in a window of w, so that each meets its own power of A
    window = count.unsqueeze(-1) - block + torch.arange(block, device=u.device)
    alive = window >= (whole * block).unsqueeze(-1)
    window = window.clamp(min=0).flatten(1)
    kept = torch.ones_like(count, dtype=torch.bool).unsqueeze(-1)
    if seq_idx is not None:
        last = seq_idx.gather(1, (count - 1).clamp(min=0))
        alive = alive & (seq_idx.gather(1, window).view_as(alive) == last.unsqueeze(-1))
        kept = ((seq_idx.gather(1, (whole * block - 1).clamp(min=0)) == last) | (rest == 0)).unsqueeze(-1)
    tail = u.gather(1, window.unsqueeze(-1).expand(-1, -1, channels)).view(*alive.shape, channels)
    tail = torch.where(alive.unsqueeze(-1), tail, 0.0)
    state = torch.where(kept, _moved(state, system.transition, rest, block), 0.0)
    added = torch.bmm(tail.permute(3, 0, 1, 2).reshape(channels, batch * number, block), system.input_to_state)
    return state + added.view(channels, batch, number, filters, size).permute(3, 0, 1, 2, 4)


def _moved(state: torch.Tensor, transition: Transition, rest: torch.Tensor, block: int) -> torch.Tensor:
    """A^rest s for states (F, D, B, J, N) and rest (B, J) < block."""
    if transition.form == "dense":
        for bit, step in enumerate(transition.powers_of_two(block // 2) if block > 1 else ()):
            moved = ((rest >> bit) & 1).bool().unsqueeze(-1)
            state = torch.where(moved, step.apply(state.flatten(2, 3)).view(state.shape), state)
        return state
    numbers = _numbers(state, transition.form)
    powers = power(transition.diagonal()[:, :, None, None], rest.unsqueeze(-1)).to(numbers.dtype)
    moved = numbers * powers
    return torch.view_as_real(moved).flatten(-2) if transition.form == "complex" else moved
