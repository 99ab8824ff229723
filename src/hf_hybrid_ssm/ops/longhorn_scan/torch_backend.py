"""The Longhorn scan in torch, without a loop over time.

Time is cut into G blocks of C tokens. All blocks advance together, one token position at a time: first from a zero
state, which yields each block's decay and own contribution; then the G boundary states follow one from the other; then
once more with the right start. Backward recomputes the states, for a slice of channels at a time, so that memory stays
linear in the length and no (B, L, D, N) tensor outlives a slice. Both directions are custom ops, one node each for
`torch.compile` and export.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.custom_ops import differentiable_op, filled
from hf_hybrid_ssm.ops.core.padding import zero_beyond
from hf_hybrid_ssm.ops.core.pages import gathers_pages
from hf_hybrid_ssm.ops.longhorn_scan.heads import over_heads
from hf_hybrid_ssm.ops.longhorn_scan.reference import ScanInputs, scan_flops

SLICE_NUMBERS = 2**23  # numbers of one (B, L, D slice, N) tensor in backward


@over_heads
def longhorn_scan_torch(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.longhorn_scan.longhorn_scan`."""
    x, beta_logit, k, q, z, beta_bias, D, state, seq_idx, lengths, *_ = inputs
    dtype = torch.promote_types(x.dtype, torch.float32)
    values, logits, keys = (zero_beyond(part, lengths).to(dtype) for part in (x, beta_logit, k))
    logits = logits if beta_bias is None else logits + beta_bias
    wide = ScanInputs(values, logits, keys, q.to(dtype), state=None if state is None else state.to(dtype))
    y, final_state = _one_token(wide) if x.shape[1] == 1 else scan(*wide._replace(seq_idx=seq_idx))
    if D is not None:
        y = y + D * values
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), final_state


def _keep_mask(seq_idx: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """m (B, L): 0 where a document begins, else 1. The initial state belongs to the document of the first token."""
    if seq_idx is None:
        return None
    same = seq_idx[:, 1:] == seq_idx[:, :-1]
    return torch.cat([torch.ones_like(same[:, :1]), same], 1).to(dtype)


def _one_token(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """All tensors (B, 1, ...)."""
    x, beta_logit, k, q, *_ = inputs
    state = inputs.state
    delta = compute_delta(beta_logit, k).transpose(1, 2)  # (B, D, 1)
    write = delta * k  # (B, D, N)
    value = x.transpose(1, 2)
    after = write * value if state is None else state + write * (value - state * k)
    return (after @ q.transpose(1, 2)).transpose(1, 2), after


def compute_delta(beta_logit: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Δ = β / (1 + β |k|²) with β = sigmoid(beta_logit); (B, L, D)."""
    beta = torch.sigmoid(beta_logit)
    return beta / (1 + beta * (k * k).sum(-1, keepdim=True))


def _block_length(length: int) -> int:
    """C about √L: 2C + G steps over time instead of L."""
    return 1 << (max(length, 1).bit_length() // 2)


def _blocks(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(B, L, X) → (C, B, G, X), zero padded: a token with k = 0 leaves the state as it is."""
    padded = F.pad(tensor, (0, 0, 0, -tensor.shape[1] % size))
    return padded.unflatten(1, (-1, size)).permute(2, 0, 1, 3).contiguous()


def _flat(blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The inverse, (C, B, G, X) → (B, L, X)."""
    size, batch, count, width = blocks.shape
    return blocks.permute(1, 2, 0, 3).reshape(batch, count * size, width)[:, :length]


class _ChannelSlice:
    """Some channels of one call, cut into blocks.

    value, delta (C, B, G, D); key, query (C, B, G, N); keep (C, B, G, 1, 1) or None.
    """

    def __init__(
        self, x: torch.Tensor, delta: torch.Tensor, k: torch.Tensor, q: torch.Tensor, keep: torch.Tensor | None
    ) -> None:
        size = _block_length(x.shape[1])
        self.value, self.delta, self.key, self.query = (_blocks(tensor, size) for tensor in (x, delta, k, q))
        self.size = size
        self.keep = None
        if keep is not None:
            padded = F.pad(keep, (0, -keep.shape[1] % size), value=1.0)
            self.keep = padded.view(keep.shape[0], -1, size).permute(2, 0, 1)[..., None, None].contiguous()

    def decay(self, c: int) -> torch.Tensor:
        """m a of the c-th token of every block, (B, G, D, N)."""
        decay = 1 - self.delta[c].unsqueeze(-1) * self.key[c].square().unsqueeze(-2)
        return decay if self.keep is None else decay * self.keep[c]

    def write(self, c: int) -> torch.Tensor:
        """Δ x k of the c-th token of every block, (B, G, D, N)."""
        return (self.delta[c] * self.value[c]).unsqueeze(-1) * self.key[c].unsqueeze(-2)

    def initial_states(self, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States before each block (B, G, D, N), the final state (B, D, N), and each block's decay."""
        h, product = self.write(0), self.decay(0)
        for c in range(1, self.size):
            decay = self.decay(c)
            h = torch.addcmul(self.write(c), decay, h)
            product = product * decay
        state, states = torch.zeros_like(h[:, 0]) if state is None else state, []
        for g in range(h.shape[1]):
            states.append(state)
            state = torch.addcmul(h[:, g], product[:, g], state)
        return torch.stack(states, 1), state, product


def _slices(x: torch.Tensor, k: torch.Tensor) -> list[slice]:
    (batch, length, channels), states = x.shape, k.shape[-1]
    width = max(1, SLICE_NUMBERS // max(1, batch * length * states))
    return [slice(start, min(start + width, channels)) for start in range(0, channels, width)]


def _forward(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """y (B, L, D) without skip and gate, and the final state (B, D, N); all inputs of one dtype, L ≥ 1."""
    x, beta_logit, k, q, *_ = inputs
    (y, final), initial_state, seq_idx = _fake(inputs), inputs.state, inputs.seq_idx
    delta, keep = compute_delta(beta_logit, k), _keep_mask(seq_idx, x.dtype)
    for channels in _slices(x, k):
        part = _ChannelSlice(x[..., channels], delta[..., channels], k, q, keep)
        h, final[:, channels], _ = part.initial_states(None if initial_state is None else initial_state[:, channels])
        outputs = []
        for c in range(part.size):
            h = torch.addcmul(part.write(c), part.decay(c), h)
            outputs.append((h @ part.query[c].unsqueeze(-1)).squeeze(-1))
        y[..., channels] = _flat(torch.stack(outputs), x.shape[1])
    return y, final


def _fake(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    x = inputs.x
    return x.new_empty(x.shape), x.new_empty(x.shape[0], x.shape[2], inputs.k.shape[2])


def _backward(inputs: ScanInputs, gradients: Sequence, needed: Sequence[bool]) -> tuple[torch.Tensor | None, ...]:
    """Of x, beta_logit, k, q and the initial state."""
    x, beta_logit, k, q, *_ = inputs
    initial_state, seq_idx = inputs.state, inputs.seq_idx
    dy, dfinal = filled(gradients, lambda: _fake(inputs))
    dx, ddelta, dinitial = x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(dfinal.shape)
    dk, dq = x.new_zeros(k.shape), x.new_zeros(k.shape)
    delta, keep = compute_delta(beta_logit, k), _keep_mask(seq_idx, x.dtype)
    for channels in _slices(x, k):
        part = _ChannelSlice(x[..., channels], delta[..., channels], k, q, keep)
        state = None if initial_state is None else initial_state[:, channels]
        of_slice = _slice_backward(part, state, _blocks(dy[..., channels], part.size), dfinal[:, channels])
        dvalue, dslice, dkey, dquery, dinitial[:, channels] = of_slice
        dx[..., channels], ddelta[..., channels] = _flat(dvalue, x.shape[1]), _flat(dslice, x.shape[1])
        dk += _flat(dkey, x.shape[1])
        dq += _flat(dquery, x.shape[1])
    # Δ = β / (1 + β |k|²):  dΔ/dlogit = Δ² (1 - β)/β = Δ (1 - β)/(1 + β |k|²),  dΔ/d|k|² = -Δ²
    beta = torch.sigmoid(beta_logit)
    dlogit = ddelta * delta * torch.sigmoid(-beta_logit) / (1 + beta * (k * k).sum(-1, keepdim=True))
    dk -= 2 * k * (delta * delta * ddelta).sum(-1, keepdim=True)
    return dx, dlogit.contiguous(), dk, dq, None, None, None, dinitial


def _slice_backward(
    part: _ChannelSlice, state: torch.Tensor | None, dy: torch.Tensor, dfinal: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of value, delta, key (through writes and decays), query, in blocks, and of the initial state.

    λ_t = dL/dh_t obeys λ_t = dy_t q_t + m_{t+1} a_{t+1} λ_{t+1}: the same recurrence, backwards.
    """
    start, _, product = part.initial_states(state)
    before, after, h = [], [], start
    for c in range(part.size):
        before.append(h if part.keep is None else h * part.keep[c])
        h = torch.addcmul(part.write(c), part.decay(c), h)
        after.append(h)
    # λ that enters each block from later ones: local sums from zero, then the boundaries, last block first
    local = torch.zeros_like(start)
    for c in reversed(range(part.size)):
        local = part.decay(c) * torch.addcmul(local, dy[c].unsqueeze(-1), part.query[c].unsqueeze(-2))
    grad_states, grad_state = [], dfinal
    for g in reversed(range(start.shape[1])):
        grad_states.append(grad_state)
        grad_state = torch.addcmul(local[:, g], product[:, g], grad_state)
    lam = torch.stack(grad_states[::-1], 1)
    gradients = []
    for c in reversed(range(part.size)):
        key, delta, out = part.key[c].unsqueeze(-2), part.delta[c].unsqueeze(-1), dy[c].unsqueeze(-1)
        lam = torch.addcmul(lam, out, part.query[c].unsqueeze(-2))
        recalled = before[c] * key  # k h', what each coordinate predicts alone
        error = part.value[c].unsqueeze(-1) - recalled
        along = lam * key
        gradients.append(
            (
                part.delta[c] * along.sum(-1),
                (along * error).sum(-1),
                (delta * lam * (error - recalled)).sum(-2),
                (out * after[c]).sum(-2),
            )
        )
        lam = lam * part.decay(c)
    value, delta, key, query = (torch.stack(row[::-1]) for row in zip(*gradients))
    return value, delta, key, query, grad_state


scan = differentiable_op(
    "hf_hybrid_ssm::longhorn_scan_torch", ScanInputs, _forward, _backward, _fake, flops=scan_flops
)


@over_heads
@gathers_pages
def longhorn_step_torch(inputs: ScanInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One token x (B, 1, D) after `state` (B, D, N), which is overwritten."""
    x, beta_logit, k, q, z, beta_bias, D, state, *_ = inputs
    assert state is not None
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    value, key = x.to(dtype), k.to(dtype)
    beta = torch.sigmoid(beta_logit.to(dtype) if beta_bias is None else beta_logit + beta_bias)
    # beta / (1 + beta |k|^2), times k
    write = (beta / torch.addcmul(beta.new_ones(()), beta, key.square().sum(-1, keepdim=True))).mT
    write = write * key  # (B, D, N)
    before = state if state.dtype == dtype else state.to(dtype)
    state.copy_(torch.addcmul(before, write, torch.addcmul(value.mT, before, key, value=-1)))
    y = (state.to(dtype) @ q.to(dtype).mT).mT
    y = y if D is None else torch.addcmul(y, value, D.to(dtype))
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype), state
