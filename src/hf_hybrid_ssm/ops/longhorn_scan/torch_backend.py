"""The Longhorn scan in torch, without a loop over time.

Time is cut into G blocks of C tokens. All blocks advance together, one token position at a time: first from a zero
state, which yields each block's decay and own contribution; then the G boundary states follow one from the other; then
once more with the right start. Backward recomputes the states, for a slice of channels at a time, so that memory stays
linear in the length and no (B, L, D, N) tensor outlives a slice. Both directions are custom ops, one node each for
`torch.compile` and export.
"""

from typing import List  # noqa: UP035

import torch

from hf_hybrid_ssm.ops._core.lengths import zero_beyond

SLICE_NUMBERS = 2**23  # numbers of one (B, L, D slice, N) tensor in backward


def run(x, dt, k, q, *, dt_bias=None, D=None, z=None, initial_state=None, seq_idx=None, lengths=None):
    """See `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    values, tau, keys = (zero_beyond(part, lengths).to(dtype) for part in (x, dt, k))
    queries = q.to(dtype)
    tau = tau if dt_bias is None else tau + dt_bias
    state = None if initial_state is None else initial_state.to(dtype)
    if x.shape[1] == 1:
        y, final_state = _step(values, tau, keys, queries, state)
    else:
        carries = None if seq_idx is None else _carries(seq_idx, dtype)
        y, final_state = scan(values, tau, keys, queries, state, carries)
    if D is not None:
        y = y + D * values
    if z is not None:
        y = y * torch.nn.functional.silu(z.to(dtype))
    return y.to(x.dtype), final_state


def _carries(seq_idx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """m (B, L): 0 where a document begins, else 1. The initial state belongs to the document of the first token."""
    same = seq_idx[:, 1:] == seq_idx[:, :-1]
    return torch.cat([torch.ones_like(same[:, :1]), same], 1).to(dtype)


def _step(x, tau, k, q, state):
    """One token; all tensors (B, 1, ...)."""
    step = step_size(tau, k).transpose(1, 2)  # (B, D, 1)
    write = step * k  # (B, D, N)
    value = x.transpose(1, 2)
    after = write * value if state is None else state + write * (value - state * k)
    return (after @ q.transpose(1, 2)).transpose(1, 2), after


def step_size(tau: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Δ = β / (1 + β |k|²) with β = sigmoid(tau); (B, L, D)."""
    beta = torch.sigmoid(tau)
    return beta / (1 + beta * (k * k).sum(-1, keepdim=True))


def _block_length(length: int) -> int:
    """C about √L: 2C + G steps over time instead of L."""
    return 1 << (max(length, 1).bit_length() // 2)


def _blocks(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(B, L, X) → (C, B, G, X), zero padded: a token with k = 0 leaves the state as it is."""
    batch, length, width = tensor.shape
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, -length % size))
    return padded.view(batch, -1, size, width).permute(2, 0, 1, 3).contiguous()


def _flat(blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The way back, (C, B, G, X) → (B, L, X)."""
    size, batch, count, width = blocks.shape
    return blocks.permute(1, 2, 0, 3).reshape(batch, count * size, width)[:, :length]


class _ChannelSlice:
    """Some channels of one call, cut into blocks.

    value, step (C, B, G, D); key, query (C, B, G, N); carry (C, B, G, 1, 1) or None.
    """

    def __init__(self, x, step, k, q, carries):
        size = _block_length(x.shape[1])
        self.value, self.step, self.key, self.query = (_blocks(tensor, size) for tensor in (x, step, k, q))
        self.size = size
        self.carry = None
        if carries is not None:
            padded = torch.nn.functional.pad(carries, (0, -carries.shape[1] % size), value=1.0)
            self.carry = padded.view(carries.shape[0], -1, size).permute(2, 0, 1)[..., None, None].contiguous()

    def decay(self, c: int) -> torch.Tensor:
        """m a of the c-th token of every block, (B, G, D, N)."""
        decay = 1 - self.step[c].unsqueeze(-1) * self.key[c].square().unsqueeze(-2)
        return decay if self.carry is None else decay * self.carry[c]

    def write(self, c: int) -> torch.Tensor:
        """Δ x k of the c-th token of every block, (B, G, D, N)."""
        return (self.step[c] * self.value[c]).unsqueeze(-1) * self.key[c].unsqueeze(-2)

    def starts(self, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States before each block (B, G, D, N), the final state (B, D, N), and each block's decay."""
        h, product = self.write(0), self.decay(0)
        for c in range(1, self.size):
            decay = self.decay(c)
            h = torch.addcmul(self.write(c), decay, h)
            product = product * decay
        carried, states = torch.zeros_like(h[:, 0]) if state is None else state, []
        for g in range(h.shape[1]):
            states.append(carried)
            carried = torch.addcmul(h[:, g], product[:, g], carried)
        return torch.stack(states, 1), carried, product


def _slices(x: torch.Tensor, k: torch.Tensor) -> list[slice]:
    (batch, length, channels), states = x.shape, k.shape[-1]
    width = max(1, SLICE_NUMBERS // max(1, batch * length * states))
    return [slice(start, min(start + width, channels)) for start in range(0, channels, width)]


@torch.library.custom_op("hf_hybrid_ssm::longhorn_scan_torch", mutates_args=())
def scan(
    x: torch.Tensor,
    tau: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    initial_state: torch.Tensor | None,
    carries: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, L, D) without skip and gate, and the final state (B, D, N); all inputs of one dtype, L ≥ 1."""
    y, final = torch.empty_like(x), x.new_empty(x.shape[0], x.shape[2], k.shape[2])
    step = step_size(tau, k)
    for channels in _slices(x, k):
        part = _ChannelSlice(x[..., channels], step[..., channels], k, q, carries)
        h, final[:, channels], _ = part.starts(None if initial_state is None else initial_state[:, channels])
        rows = []
        for c in range(part.size):
            h = torch.addcmul(part.write(c), part.decay(c), h)
            rows.append((h @ part.query[c].unsqueeze(-1)).squeeze(-1))
        y[..., channels] = _flat(torch.stack(rows), x.shape[1])
    return y, final


@scan.register_fake
def _(x, tau, k, q, initial_state, carries):
    return torch.empty_like(x), x.new_empty(x.shape[0], x.shape[2], k.shape[2])


@torch.library.custom_op("hf_hybrid_ssm::longhorn_scan_torch_backward", mutates_args=())
def scan_backward(
    x: torch.Tensor,
    tau: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    initial_state: torch.Tensor | None,
    carries: torch.Tensor | None,
    dy: torch.Tensor,
    dfinal: torch.Tensor,
) -> List[torch.Tensor]:  # noqa: UP006 - all that torch 2.6 reads
    """Gradients of x, tau, k, q and the initial state."""
    dx, dstep, dinitial = torch.empty_like(x), torch.empty_like(x), torch.empty_like(dfinal)
    dk, dq = torch.zeros_like(k), torch.zeros_like(q)
    step = step_size(tau, k)
    for channels in _slices(x, k):
        part = _ChannelSlice(x[..., channels], step[..., channels], k, q, carries)
        state = None if initial_state is None else initial_state[:, channels]
        gradients = _slice_backward(part, state, _blocks(dy[..., channels], part.size), dfinal[:, channels])
        value, size, key, query, dinitial[:, channels] = gradients
        dx[..., channels], dstep[..., channels] = _flat(value, x.shape[1]), _flat(size, x.shape[1])
        dk += _flat(key, x.shape[1])
        dq += _flat(query, x.shape[1])
    # Δ = β / (1 + β |k|²):  dΔ/dtau = Δ² (1 - β)/β = Δ (1 - β)/(1 + β |k|²),  dΔ/d|k|² = -Δ²
    beta = torch.sigmoid(tau)
    dtau = dstep * step * torch.sigmoid(-tau) / (1 + beta * (k * k).sum(-1, keepdim=True))
    dk -= 2 * k * (step * step * dstep).sum(-1, keepdim=True)
    return [dx, dtau, dk, dq, dinitial]


def _slice_backward(part: _ChannelSlice, state, dy: torch.Tensor, dfinal: torch.Tensor):
    """Gradients of value, step, key (through writes and decays), query, in blocks, and of the initial state.

    λ_t = dL/dh_t obeys λ_t = dy_t q_t + m_{t+1} a_{t+1} λ_{t+1}: the same recurrence, backwards.
    """
    start, _, product = part.starts(state)
    before, after, h = [], [], start
    for c in range(part.size):
        before.append(h if part.carry is None else h * part.carry[c])
        h = torch.addcmul(part.write(c), part.decay(c), h)
        after.append(h)
    # λ that enters each block from behind: local sums with zero behind, then the boundaries, last block first
    local = torch.zeros_like(start)
    for c in reversed(range(part.size)):
        local = part.decay(c) * torch.addcmul(local, dy[c].unsqueeze(-1), part.query[c].unsqueeze(-2))
    behind, carried = [], dfinal
    for g in reversed(range(start.shape[1])):
        behind.append(carried)
        carried = torch.addcmul(local[:, g], product[:, g], carried)
    lam = torch.stack(behind[::-1], 1)
    rows = []
    for c in reversed(range(part.size)):
        key, step, out = part.key[c].unsqueeze(-2), part.step[c].unsqueeze(-1), dy[c].unsqueeze(-1)
        lam = torch.addcmul(lam, out, part.query[c].unsqueeze(-2))
        recalled = before[c] * key  # k h', what each coordinate predicts alone
        error = part.value[c].unsqueeze(-1) - recalled
        along = lam * key
        rows.append(
            (
                part.step[c] * along.sum(-1),
                (along * error).sum(-1),
                (step * lam * (error - recalled)).sum(-2),
                (out * after[c]).sum(-2),
            )
        )
        lam = lam * part.decay(c)
    value, size, key, query = (torch.stack(row[::-1]) for row in zip(*rows))
    return value, size, key, query, carried


@scan_backward.register_fake
def _(x, tau, k, q, initial_state, carries, dy, dfinal):
    return [torch.empty_like(tensor) for tensor in (x, tau, k, q, dfinal)]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradient(ctx, dy, dfinal):
    *inputs, initial_state, carries = ctx.saved_tensors
    *gradients, dinitial = scan_backward(*inputs, initial_state, carries, dy.contiguous(), dfinal.contiguous())
    return (*gradients, None if initial_state is None else dinitial, None)


scan.register_autograd(_gradient, setup_context=_setup_context)
