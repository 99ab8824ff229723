# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: 7d0adbe10ce4bad8163fdd5032be049aba00d9abcc40ab890f446723fab96c99

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .dispatch import (
    Op, causal_toeplitz, check_lengths, check_output_positions, check_seq_idx, check_tensor, document_before_block,
    document_blocks, draw, power_of_two, take_outputs, without_autocast, zero_beyond,
)
from .long_conv import block_conv, channels_first, channels_last


# ---- ops/linear_scan/transition.py ----------------------------------------------------------------------------------
# The matrix A of a recurrence in the form it has: real or complex numbers on the diagonal, or a dense real matrix.

def power(base: torch.Tensor, exponent: int | torch.Tensor) -> torch.Tensor:
    """base^k for k >= 0. Complex powers go through the logarithm of a square, which 0 and what underflows do not have;
    they are taken as a number that is too small to matter."""
    if base.is_complex():
        base = base + (1e-150 if base.dtype == torch.complex128 else 1e-17)
    return torch.pow(base, exponent)


def power_table(base: torch.Tensor, start: int, step: int, count: int) -> torch.Tensor:
    """base^{start + step j} for j < count, (..., count, N) of base (..., N), by doubling: complex numbers multiply
    many times faster than `torch.pow` raises them."""
    table, ratio = power(base, start).unsqueeze(-2), power(base, step).unsqueeze(-2)
    while table.shape[-2] < count:
        table = torch.cat([table, table * ratio], dim=-2)
        ratio = ratio * ratio
    return table[..., :count, :]


class Transition(NamedTuple):
    """A linear map on real states (..., N), batched over leading dimensions.

    Args:
        value: "real": (..., N), the diagonal. "complex": (..., N / 2, 2), the diagonal as real and imaginary parts;
            the state holds N / 2 complex numbers, real and imaginary part next to each other. "dense": (..., N, N), A
            transposed, so that a row of states times it is the next row.
        form: "real", "complex" or "dense".
    """

    value: torch.Tensor
    form: str

    def to(self, dtype: torch.dtype) -> "Transition":
        """The same, of real and imaginary parts in `dtype`."""
        return Transition(self.value.to(dtype), self.form)

    def diagonal(self) -> torch.Tensor:
        """(..., N) real or (..., N / 2) complex; not for a dense one."""
        return torch.view_as_complex(self.value) if self.form == "complex" else self.value

    def power(self, exponent: int | torch.Tensor) -> "Transition":
        """A^k of a diagonal one; a tensor of exponents broadcasts against the diagonal."""
        powers = power(self.diagonal(), exponent)
        return Transition(torch.view_as_real(powers) if self.form == "complex" else powers, self.form)

    def apply(self, rows: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """A s (or A^T s) for every row s of `rows` (..., M, N)."""
        if self.form == "dense":
            return torch.matmul(rows, self.value.mT if transposed else self.value)
        diagonal = self.diagonal().unsqueeze(-2)
        if self.form == "real":
            return rows * diagonal
        state = torch.view_as_complex(rows.unflatten(-1, (-1, 2)))
        return torch.view_as_real(state * (diagonal.conj() if transposed else diagonal)).flatten(-2)

    def orbit(
        self, vectors: torch.Tensor, count: int, *, start: int = 0, step: int = 1, transposed: bool = False
    ) -> torch.Tensor:
        """A^{start + step j} v for j < count, (..., count, N) of v (..., N): one product with a table of powers.

        The powers are taken in the precision of the diagonal and rounded at the end to that of the vectors. A dense
        matrix has `doubled` instead.
        """
        powers = power_table(self.diagonal(), start, step, count)
        if self.form == "real":
            return powers.to(vectors.dtype) * vectors.unsqueeze(-2)
        states = torch.view_as_complex(vectors.unflatten(-1, (-1, 2))).unsqueeze(-2)
        powers = (powers.conj() if transposed else powers).to(states.dtype)
        return torch.view_as_real(powers * states).flatten(-2)

    def doubled(
        self, rows: torch.Tensor, count: int, *, transposed: bool = False
    ) -> tuple[torch.Tensor, "Transition"]:
        """Of a dense one, `rows` (..., M, N) times A^0, A^1, ..., A^{count - 1}, and A^count; `count` a power of two.

        Rows and power stand in one matrix, so that each doubling is one product.
        """
        size = rows.shape[-1]
        stack = torch.cat([rows, self.value.mT if transposed else self.value], dim=-2)
        for _ in range(count.bit_length() - 1):
            product = torch.matmul(stack, stack[..., -size:, :])
            stack = torch.cat([stack[..., :-size, :], product], dim=-2)
        last = stack[..., -size:, :]
        return stack[..., :-size, :], Transition(last.mT if transposed else last, self.form)

    def powers_of_two(self, largest: int) -> tuple["Transition", ...]:
        """A^1, A^2, A^4, ..., A^largest of a dense one."""
        powers = [self.value]
        while 1 << len(powers) <= largest:
            powers.append(torch.matmul(powers[-1], powers[-1]))
        return tuple(Transition(value, self.form) for value in powers)


# ---- ops/linear_scan/torch_backend.py -------------------------------------------------------------------------------
# The recurrences in plain torch: the diagonal scan, and one token of a linear system.
#
# The scan takes products inside of blocks, and the same scan over the states at their borders.

TORCH_BACKEND_BLOCK = 32  # tokens; the depth of the recursion is the logarithm of the length to this base


def diagonal_scan_torch(decay, x, initial_state, seq_idx):
    """h_t = a h_{t-1} + x_t, real or complex.

    Args:
        decay: (M,), or (M, 2) for complex numbers as real and imaginary parts; as precise as x, or twice.
        x: (B, L, M) or (B, L, M, 2), B and L at least 1.
        initial_state: (B, M) or (B, M, 2), or None for zeros.
        seq_idx: (B, L) or None.

    Returns:
        h of x's shape.
    """
    if decay.dim() == 1:
        return _scan(decay, x, initial_state, seq_idx)
    start = None if initial_state is None else torch.view_as_complex(initial_state)
    return torch.view_as_real(_scan(torch.view_as_complex(decay), torch.view_as_complex(x), start, seq_idx))


def _scan(
    decay: torch.Tensor, x: torch.Tensor, start: torch.Tensor | None, seq_idx: torch.Tensor | None
) -> torch.Tensor:
    batch, length, size = x.shape
    block = min(TORCH_BACKEND_BLOCK, 1 << (length - 1).bit_length())
    blocks = -(-length // block)
    gap = blocks * block - length
    padded = torch.cat([x, x.new_zeros(batch, gap, size)], dim=1) if gap else x
    documents = document_blocks(seq_idx, block)
    exponents = torch.arange(block + 1, device=x.device).unsqueeze(1)
    wide_powers = power(decay, exponents)
    powers = wide_powers.to(x.dtype)  # (w + 1, M)
    h = _states_from_zero(padded.view(batch, blocks, block, size), powers, documents)
    starts = x.new_zeros(batch, 1, size) if start is None else start.unsqueeze(1)
    if blocks > 1:
        ends = h[:, :, -1]
        if documents is not None:  # the first state must outlive the first block's documents; later ones see to it
            kept = (documents[:, 0, 0] == documents[:, 0, -1]).view(-1, 1, 1)
            entering = torch.where(kept, starts, torch.zeros_like(starts)).squeeze(1)
        else:
            entering = starts.squeeze(1)
        borders = _scan(wide_powers[-1], ends, entering, None if documents is None else documents[..., -1])
        starts = torch.cat([starts, borders[:, :-1]], dim=1)
    elif start is None:
        return h.view(batch, block, size)[:, :length]
    carried = powers[1:] * starts.unsqueeze(2)
    if documents is not None:
        alive = (documents == document_before_block(documents)).unsqueeze(-1)
        carried = torch.where(alive, carried, torch.zeros_like(carried))
    return (h + carried).view(batch, blocks * block, size)[:, :length]


def _states_from_zero(tokens: torch.Tensor, powers: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """States of every block started at zero. tokens (B, n, w, M) -> (B, n, w, M)."""
    batch, blocks, block, size = tokens.shape
    if documents is None and batch * blocks >= block:  # else the matrices would outweigh the tokens
        matrix = causal_toeplitz(powers[:block].mT)  # (M, w, w)
        rows = tokens.permute(3, 0, 1, 2).reshape(size, batch * blocks, block)
        return torch.bmm(rows, matrix).view(size, batch, blocks, block).permute(1, 2, 3, 0)
    half, h = 1, tokens
    while half < block:  # the state at the end of the left half enters the right half if its document continues
        pairs = h.reshape(batch, blocks, block // (2 * half), 2, half, size)
        entering = powers[1 : half + 1] * pairs[..., 0, -1:, :]
        if documents is not None:
            spans = documents.reshape(batch, blocks, block // (2 * half), 2, half)
            same = (spans[..., 1, :] == spans[..., 0, -1:]).unsqueeze(-1)
            entering = torch.where(same, entering, 0.0)
        h = torch.stack([pairs[..., 0, :, :], pairs[..., 1, :, :] + entering], dim=3)
        half *= 2
    return h.reshape(batch, blocks, block, size)


def linear_step_torch(u, state, change, input_vector, *, output_rows, low_rank, skip, is_complex, silu):
    """See `hf_hybrid_ssm.ops.linear_scan.linear_step`."""
    h, value = state.to(change.dtype), u.to(change.dtype)[:, None, :, None]
    if is_complex:
        moved = torch.view_as_real(_complex(change) * _complex(h)).flatten(-2)
    else:
        moved = change * h
    if low_rank is not None:
        left, right = low_rank
        moved = torch.addcmul(moved, left, torch.linalg.vecdot(right, h).unsqueeze(-1), value=-1)
    after = h + torch.addcmul(moved, input_vector, value)
    state.copy_(after)
    if output_rows is None:
        return None, state
    y = torch.linalg.vecdot(output_rows, after)
    y = y if skip is None else torch.addcmul(y, skip, value.squeeze(-1))
    return (F.silu(y) if silu else y).to(u.dtype), state


def _complex(pairs: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(pairs.contiguous().unflatten(-1, (-1, 2)))


# ---- ops/linear_scan/reference.py -----------------------------------------------------------------------------------
# The recurrences, token by token.

def diagonal_scan_reference(decay, x, initial_state, seq_idx):
    """h_t = a h_{t-1} + x_t, with h = 0 before the first token of a document; shapes as in `diagonal_scan_torch`.

    Each product is taken in the wider of the two dtypes and rounded to x's.
    """
    is_complex = decay.dim() == 2
    if is_complex:
        decay, x = torch.view_as_complex(decay), torch.view_as_complex(x)
        initial_state = None if initial_state is None else torch.view_as_complex(initial_state)
    state, states = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state, []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            state = torch.where((seq_idx[:, t] == seq_idx[:, t - 1]).unsqueeze(-1), state, torch.zeros_like(state))
        state = (decay * state + x[:, t]).to(x.dtype)
        states.append(state)
    h = torch.stack(states, dim=1)
    return torch.view_as_real(h) if is_complex else h


def channel_scan_reference(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions, *,
    form, blocks=None
):  # fmt: skip
    """s_t = A s_{t-1} + B u_t, y_t = C s_t + D u_t; shapes as in `channel_scan_torch`."""
    transition, u = Transition(decay, form), zero_beyond(u.to(output.dtype), lengths)
    batch, length, channels = u.shape
    state, outputs = u.new_zeros(batch, *output.shape) if initial_state is None else initial_state, []
    for t in range(length):
        real = torch.ones(batch, dtype=torch.bool, device=u.device) if lengths is None else t < lengths
        real = real.view(-1, 1, 1, 1)
        before = state
        if seq_idx is not None and t > 0:
            same = (seq_idx[:, t] == seq_idx[:, t - 1]).view(-1, 1, 1, 1)
            before = torch.where(same, state, 0.0)
        token = u[:, t].unsqueeze(1)
        following = transition.apply(before.unsqueeze(-2)).squeeze(-2) + vector * token.unsqueeze(-1)
        state = torch.where(real, following, state)
        outputs.append((output * following).sum(-1) + (0.0 if skip is None else skip * token))
    y = torch.stack(outputs, dim=1) if outputs else u.new_zeros(batch, 0, output.shape[0], channels)
    y = take_outputs(y.flatten(2), stride, positions).unflatten(-1, y.shape[2:])
    return y, (state if return_final_state else None)


def _decays(*shape: int) -> torch.Tensor:
    """Complex numbers inside of the unit circle as pairs (..., 2), most of them near it."""
    size, angle = draw({"size": shape, "angle": shape}).values()
    return torch.view_as_real(torch.polar(torch.sigmoid(3 + 2 * size), 3 * angle))


def diagonal_inputs() -> dict:
    """Longer than a block, with a state before the first token and decays near 1."""
    return draw({"x": (2, 75, 5, 2), "initial_state": (2, 5, 2)}) | {"decay": _decays(5), "seq_idx": None}


def channel_inputs() -> dict:
    """The same, for two filters of three channels."""
    shapes = {"u": (2, 75, 3), "vector": (2, 3, 6), "output": (2, 3, 6), "skip": (2, 3), "initial_state": (2, 2, 3, 6)}
    options = {"seq_idx": None, "lengths": None, "stride": None, "positions": None, "form": "complex"}
    return draw(shapes) | options | {"decay": _decays(2, 3, 3), "return_final_state": True}


def linear_step_reference(u, state, change, input_vector, *, output_rows, low_rank, skip, is_complex, silu):
    """See `hf_hybrid_ssm.ops.linear_scan.linear_step`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(u.dtype, torch.float32)
    h, value, a, b = state.to(dtype), u.to(dtype)[:, None, :, None], change.to(dtype), input_vector.to(dtype)
    if is_complex:
        (real, imaginary), (x, y) = a.unflatten(-1, (-1, 2)).unbind(-1), h.unflatten(-1, (-1, 2)).unbind(-1)
        moved = torch.stack([real * x - imaginary * y, real * y + imaginary * x], -1).flatten(-2)
    else:
        moved = a * h
    if low_rank is not None:
        left, right = (part.to(dtype) for part in low_rank)
        moved = moved - left * (right * h).sum(-1, keepdim=True)
    after = h + (moved + b * value)
    state.copy_(after)
    if output_rows is None:
        return None, state
    out = (output_rows.to(dtype) * after).sum(-1)
    out = out if skip is None else out + skip.to(dtype) * value.squeeze(-1)
    return (F.silu(out) if silu else out).to(u.dtype), state


def step_inputs() -> dict:
    """Complex, with a product of rank one, states that do not fill a vector."""
    constants = dict.fromkeys(("change", "input_vector", "output_rows", "left", "right"), (2, 3, 22))
    tensors = draw({"u": (2, 3), "state": (2, 2, 3, 22), "skip": (2, 3)} | constants)
    # a tuple of tensors would not be cast: every entry is bfloat16 already
    low_rank = tuple(tensors.pop(name).bfloat16().float() for name in ("left", "right"))
    return tensors | {"low_rank": low_rank, "is_complex": True, "silu": True}


# ---- ops/linear_scan/step.py ----------------------------------------------------------------------------------------
# One token of diagonal linear systems, and of diagonal ones plus a product of rank one, with their outputs.

_STEP_OP = Op(
    "linear_step",
    builtin={"torch": linear_step_torch, "reference": linear_step_reference},
    kernels={},
    self_check_inputs=step_inputs,
    differentiable=False,
)


def linear_step(
    u: torch.Tensor,
    state: torch.Tensor,
    change: torch.Tensor,
    input_vector: torch.Tensor,
    *,
    output_rows: torch.Tensor | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    skip: torch.Tensor | None = None,
    is_complex: bool = False,
    silu: bool = False,
    backend: str | None = None,
) -> torch.Tensor | None:
    r"""s = s + a s - l (r · s) + b u,  y = act(c · s + d u), for F systems of N real numbers on each of D channels.

    `state` becomes s in place; nothing has a gradient. (What a token changes is small where memories are long: its
    digits would be lost in a factor near 1.)

    Args:
        u: (B, D).
        state: (B, F, D, N).
        change, input_vector: a and b, (F, D, N), all constants in one dtype, float32 or float64; with `is_complex` the
            N numbers are N / 2 pairs of a real and an imaginary part, and a s is a complex product (all others real).
        output_rows: c, (F, D, N); without it there is no output.
        low_rank: l and r, (F, D, N) each.
        skip: d, (F, D).
        silu: act is SiLU instead of nothing.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, F, D) in the dtype of u, or None.

    Raises:
        TypeError, ValueError: an argument of wrong type or shape; an unknown or unusable backend.
    """
    check_tensor("u", u, (None, None), "B, D")
    check_tensor("state", state, (u.shape[0], None, u.shape[1], None), "B, F, D, N")
    shape = tuple(state.shape[1:])
    check_tensor("change", change, shape, "F, D, N")
    check_tensor("input_vector", input_vector, shape, "F, D, N", like=change)
    check_tensor("output_rows", output_rows, shape, "F, D, N", like=change, optional=True)
    check_tensor("skip", skip, shape[:2], "F, D", like=change, optional=True)
    for name, part in zip(("low_rank[0]", "low_rank[1]"), low_rank or ()):
        check_tensor(name, part, shape, "F, D, N", like=change)
    run = _STEP_OP.select(u.device.type, change.dtype, backend)
    options = {"output_rows": output_rows, "low_rank": low_rank, "skip": skip, "is_complex": is_complex, "silu": silu}
    return run(u, state, change, input_vector, **options)[0]


# ---- ops/linear_scan/diagonal.py ------------------------------------------------------------------------------------
# Diagonal recurrence whose states are themselves the result: h_t = a h_{t-1} + x_t (S5).

_DIAGONAL_OP = Op(
    "diagonal_scan",
    builtin={"torch": diagonal_scan_torch, "reference": diagonal_scan_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.linear_scan_triton"},
    self_check_inputs=diagonal_inputs,
)
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def diagonal_scan(
    decay: torch.Tensor,
    x: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""All states of a time-invariant diagonal recurrence, in memory linear in L.

        h_t = a h_{t-1} + x_t

    Args:
        decay: (M,) a, of x's dtype, or twice as precise: its powers are then computed in that precision and rounded
            once. If an a near 1 were rounded to float32, the state would decay at a different rate.
        x: (B, L, M), real (float32, float64) or complex (complex64, complex128).
        initial_state: (B, M) the state before the first token, of the row's first document (zeros when None).
        seq_idx: (B, L) int, documents of a packed row; the state starts at zero where it changes.
        lengths: (B,) int, number of real tokens at the front of each row; it moves only the final state.
        return_final_state: also return the state after each row's last real token.

    Returns:
        h (B, L, M), and the final state (B, M) or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    check_tensor("x", x, (None, None, None), "B, L, M")
    if x.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        raise TypeError(f"x must be float32, float64, complex64 or complex128, got {x.dtype}.")
    batch, length, size = x.shape
    is_wide = isinstance(decay, torch.Tensor) and decay.dtype == _WIDE.get(x.dtype)
    check_tensor("decay", decay, (size,), "M", like=x.new_empty(0, dtype=decay.dtype) if is_wide else x)
    check_tensor("initial_state", initial_state, (batch, size), "B, M", like=x, optional=True)
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    scan = _DIAGONAL_OP.select(x.device.type, _PARTS.get(x.dtype, x.dtype), backend)
    with without_autocast(x.device.type):
        h = x
        if x.numel():
            parts = (_real_parts(part) for part in (decay, x, initial_state))
            h = scan(*parts, seq_idx)  # type: ignore[call-arg]
            h = torch.view_as_complex(h) if x.is_complex() else h
    if not return_final_state:
        return h, None
    if lengths is None and length:
        return h, h[:, -1]
    start = x.new_zeros(batch, size) if initial_state is None else initial_state
    states = torch.cat([start.unsqueeze(1), h], dim=1)
    counts = torch.zeros(batch, dtype=torch.int64, device=x.device) if lengths is None else lengths.to(torch.int64)
    return h, states.gather(1, counts.view(-1, 1, 1).expand(-1, 1, size)).squeeze(1)


def _real_parts(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """(..., M) complex → (..., M, 2) real; a real one as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor is not None and tensor.is_complex() else tensor


# ---- ops/linear_scan/channel_blocks.py ------------------------------------------------------------------------------
# `channel_scan` in block form: products inside of blocks, a scan over borders.

CHANNEL_BLOCKS_BLOCK = 64  # tokens, where nobody says otherwise


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
        krylov, last = transition.doubled(vector.unsqueeze(-2), block)
    else:
        krylov, last = transition.orbit(vector, block), transition.power(block)
    input_to_state = krylov.flip(-2).permute(1, 2, 0, 3).flatten(2)
    return BlockStates(transition, last, output, input_to_state)


def block_outputs(transition: Transition, vector: torch.Tensor, output: torch.Tensor, block: int) -> BlockOutputs:
    """The same system's."""
    if transition.form == "dense":
        shifted = transition.to(vector.dtype).apply(output.unsqueeze(-2), transposed=True)
        state_to_output = transition.doubled(shifted, block, transposed=True)[0]
    else:
        state_to_output = transition.orbit(output, block, start=1, transposed=True)
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
        krylov, power = transition.doubled(vector.unsqueeze(-2), block)
        rows = power.doubled(output.unsqueeze(-2), power_of_two(steps), transposed=True)[0][..., :steps, :]
    else:
        krylov, rows = transition.orbit(vector, block), transition.orbit(output, steps, step=block, transposed=True)
    return torch.matmul(rows, krylov.mT).flatten(-2)[..., :length]


def channel_scan_torch(
    u, decay, vector, output, skip, initial_state, seq_idx, lengths, return_final_state, stride, positions, *,
    form, blocks=None
):  # fmt: skip
    """y (B, L, F, D) in u's dtype and the final state (B, F, D, N); arguments as in `channel_scan`.

    `decay` is the transition's value in this `form`; `blocks` gives the block matrices where they are known already.
    """
    x = zero_beyond(u.to(output.dtype), lengths)
    batch, length, channels = x.shape
    filters, _, size = output.shape
    is_fresh = initial_state is None
    if initial_state is None:
        initial_state = x.new_zeros(batch, filters, channels, size)
    if length == 0 or batch == 0:
        kept = length if stride is None else length // stride
        kept = kept if positions is None else positions.shape[1]
        return u.new_zeros(batch, kept, filters, channels), initial_state if return_final_state else None
    if blocks is None:
        matrices = (Transition(decay, form), vector, output, CHANNEL_BLOCKS_BLOCK)
        blocks = BlockMatrices(lambda: block_states(*matrices), lambda: block_outputs(*matrices))
    system = blocks.states()
    number = -(-length // system.block)
    gap = number * system.block - length
    if gap and is_fresh and lengths is None and positions is None and (stride is None or stride > length):
        # zeros change nothing before the first token, and the last one then ends a block
        x, length, first = F.pad(x, (0, 0, gap, 0)), length + gap, gap
        seq_idx = None if seq_idx is None else torch.cat([seq_idx[:, :1].expand(-1, gap), seq_idx], dim=1)
        stride, gap = None if stride is None else length + 1, 0
    else:
        first = 0
    tokens = channels_first(F.pad(x, (0, 0, 0, gap)) if gap else x).view(channels, batch, number, system.block)
    documents = document_blocks(seq_idx, system.block)
    starts = _block_starts(tokens, system, initial_state, documents)  # (F, D, B, n + 1, N)
    if positions is None:
        y = _outputs(tokens, system, blocks.outputs, starts, documents, length, stride)
    else:
        states = _states_after(x, system, starts, seq_idx, positions + 1)  # (F, D, B, J, N)
        y = torch.matmul(states, system.output[:, :, None, :, None]).squeeze(-1).permute(2, 3, 0, 1)
    if skip is not None:
        y = torch.addcmul(y, skip, take_outputs(x, stride, positions).unsqueeze(2))
    final = _final_state(x, system, starts, seq_idx, lengths) if return_final_state else None
    return y[:, first:].to(u.dtype), final


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
        h, _ = diagonal_scan(system.power.diagonal().flatten(), x, initial_state=start, seq_idx=ends)
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
    stride: int | None,
) -> torch.Tensor:
    """y (B, L, F, D), or its rows at every `stride`-th token."""
    channels, batch, blocks, block = tokens.shape
    filters, _, size = system.output.shape
    if stride is not None and stride > length:
        return tokens.new_zeros(batch, 0, filters, channels)
    if stride is not None and stride % block == 0:
        borders = starts[..., stride // block :: stride // block, :][..., : length // stride, :]
        return torch.matmul(borders, system.output[:, :, None, :, None]).squeeze(-1).permute(2, 3, 0, 1)
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
    return channels_last(y if stride is None else y[..., stride - 1 :: stride])


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


# ---- ops/linear_scan/__init__.py ------------------------------------------------------------------------------------
# Linear recurrences: a small system for every channel (here), and a diagonal one whose states are the result
# (`diagonal`).
#
# A system is read out without ever storing its states: S4, S4D, EMA.
#
#     s_t = A s_{t-1} + B u_t,    y_t = C s_t + D u_t        for each filter f and channel c on its own
#
# The states of every token would be L times N numbers per channel. The kernels for diagonal transitions keep the states
# of one token in registers. Elsewhere (`channel_blocks`) a row is cut into blocks of w tokens: the filter
# K_j = C A^j B acts inside a block as a Toeplitz matrix, A^{w-1-p} B takes its tokens into the state at its end,
# C A^{p+1} reads the state at its start. Only the state at block borders exists, and it is what makes pieces,
# documents, ragged rows and one-token steps one and the same computation.

_LINEAR_SCAN_OP = Op(
    "channel_scan",
    builtin={"torch": channel_scan_torch, "reference": channel_scan_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.linear_scan_triton"},
    self_check_inputs=channel_inputs,
)


class ChannelSystem(NamedTuple):
    """F filters for each of D channels: A, B, C.

    Args:
        transition: A. A diagonal one may be in float64 whatever the rest is: its powers are then rounded once.
        vector: B (F, D, N).
        output: C (F, D, N); the scan computes in its dtype (float32 or float64).
        blocks: gives their `block_states` and `block_outputs`, from a cache perhaps; asked only where needed.
    """

    transition: Transition
    vector: torch.Tensor
    output: torch.Tensor
    blocks: BlockMatrices | None = None


def channel_scan(
    u: torch.Tensor,
    system: ChannelSystem,
    *,
    skip: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    stride: int | None = None,
    positions: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Run the systems over a batch of sequences.

    Args:
        u: (B, L, D), any floating dtype; computed in the dtype of `system.output` (float32 or float64).
        system: F filters on each of the D channels, N real state dimensions each.
        skip: (F, D), the D term; None leaves it out.
        initial_state: (B, F, D, N) the state before the first token (zeros when None), of the row's first document.
        seq_idx: (B, L) int, documents of a packed row; the state starts at zero where it changes.
        lengths: (B,) int, number of real tokens at the front of each row.
        return_final_state: also return the state after each row's last real token.
        stride: give y only at the tokens stride - 1, 2 stride - 1, ... (cheap when it is a multiple of the block).
        positions: (B, J) int64, give y only at these tokens of each row (0..L-1).

    Returns:
        y (B, L, F, D), or (B, L // stride, F, D), or (B, J, F, D), in u's dtype; the final state (B, F, D, N) or None.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or range, named with what it must be.
    """
    filters, channels, size = system.output.shape
    check_tensor("u", u, (None, None, channels), "B, L, D")
    batch, length, _ = u.shape
    check_tensor("initial_state", initial_state, (batch, filters, channels, size), "B, F, D, N", optional=True)
    check_tensor("skip", skip, (filters, channels), "F, D", optional=True)
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    check_output_positions(stride, positions, batch, length)
    dtype = system.output.dtype
    run = _LINEAR_SCAN_OP.select(u.device.type, dtype, backend)
    with without_autocast(u.device.type):
        return run(
            u, system.transition.value, system.vector, system.output,
            *(None if part is None else part.to(dtype) for part in (skip, initial_state)),
            seq_idx, lengths, return_final_state, stride, positions,
            form=system.transition.form, blocks=system.blocks,
        )  # fmt: skip


def has_fused_scan(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a kernel runs the recurrence of a diagonal system itself, without block matrices or a filter."""
    return _LINEAR_SCAN_OP.select(device_type, dtype) is not channel_scan_torch
