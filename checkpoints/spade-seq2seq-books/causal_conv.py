# SPDX-License-Identifier: Apache-2.0
# Part of hf-hybrid-ssm 0.1.0, gathered by hf_hybrid_ssm.hub.export_code.
# Plain torch, and on CUDA the Triton kernels of hf_hybrid_ssm_kernels where that can be imported. transformers
# takes the package instead when it is installed.
# SHA-256 of this file without this line and the next: a1e9f7ab93d08fe6944da257ed75384540795a8aab21d270c4c2ee3f67c1b621

import torch
import torch.nn.functional as F

from .dispatch import Op, check_lengths, check_seq_idx, check_tensor, draw, last_inputs


# ---- ops/causal_conv/reference.py -----------------------------------------------------------------------------------
# The short causal convolution, tap by tap.

def causal_conv_reference(x, weight, bias=None, *, activation=None, initial_state=None, seq_idx=None, lengths=None):
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    (batch, length, channels), width = x.shape, weight.shape[1]
    before = x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state
    seen = torch.cat([before, x], 1).to(dtype)  # token t of this call is seen[:, width - 1 + t]
    if seq_idx is None:
        seq_idx = x.new_zeros(batch, length, dtype=torch.int64)
    document = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)
    rows = []
    for t in range(length):
        total = torch.zeros_like(seen[:, 0]) if bias is None else bias.to(dtype).expand(batch, -1)
        for j in range(width):
            same = document[:, t + j] == document[:, width - 1 + t]
            total = total + weight[:, j].to(dtype) * seen[:, t + j] * same[:, None]
        rows.append(total)
    y = torch.stack(rows, 1) if rows else torch.zeros_like(x)
    y = F.silu(y) if activation == "silu" else y
    ends = [length] * batch if lengths is None else lengths.tolist()
    states = []
    for row, end in enumerate(ends):
        last = document[row, end : end + width - 1] == document[row, max(width - 2 + end, 0)]
        states.append(seen[row, end : end + width - 1] * last[:, None])
    return y.to(x.dtype), torch.stack(states).to(x.dtype)


def self_check_inputs() -> dict:
    """Longer than a tile, with channels that do not fill one."""
    shapes = {"x": (2, 37, 18), "weight": (18, 4), "bias": (18,), "initial_state": (2, 3, 18)}
    return draw(shapes) | {"activation": "silu"}


def causal_conv_step_reference(x, state, weight, bias=None, *, activation=None):
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv_step`; computes in the same precision."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x, dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape)
    inputs = [*state.to(dtype).clone().unbind(1), x.to(dtype)]
    for lag, seen in enumerate(inputs):
        y = y + weight[:, lag].to(dtype) * seen
    for slot, seen in enumerate(inputs[1:]):
        state[:, slot] = seen
    return (F.silu(y) if activation == "silu" else y).to(x.dtype), state


def step_self_check_inputs() -> dict:
    """Two rows whose channels do not fill a vector."""
    return draw({"x": (2, 18), "state": (2, 3, 18), "weight": (18, 4), "bias": (18,)}) | {"activation": "silu"}


# ---- ops/causal_conv/torch_backend.py -------------------------------------------------------------------------------
# The short causal convolution in torch, as K shifted products.

def causal_conv_torch(x, weight, bias=None, *, activation=None, initial_state=None, seq_idx=None, lengths=None):
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv`."""
    width = weight.shape[1]
    # Both gradients of a sum of shifted products are again sums of shifted products; torch's depthwise convolution on
    # the CPU has a backward several times slower.
    seen = F.pad(x, (0, 0, width - 1, 0)) if initial_state is None else torch.cat([initial_state.to(x.dtype), x], 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = _shifted_products(seen.to(dtype), weight.to(dtype), _same_document(seq_idx, width))
    if bias is not None:
        y = y + bias.to(dtype)
    if activation == "silu":
        y = F.silu(y)
    if seq_idx is None and lengths is None:
        return y.to(x.dtype), seen[:, x.shape[1] :]
    return y.to(x.dtype), last_inputs(x, width, initial_state, seq_idx, lengths)


def _same_document(seq_idx: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """(K, B, L): whether the token that tap j reads belongs to the reader's document."""
    if seq_idx is None:
        return None
    document = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)
    return document.unfold(1, seq_idx.shape[1], 1).transpose(0, 1) == seq_idx


def _shifted_products(seen: torch.Tensor, weight: torch.Tensor, same: torch.Tensor | None) -> torch.Tensor:
    width = weight.shape[1]
    length = seen.shape[1] - width + 1
    if length == 1 and same is None:  # a step of decoding: fewer, smaller calls
        return (seen * weight.t()).sum(1, keepdim=True)
    y = None
    for j in range(width):
        tap = seen[:, j : j + length]
        if same is not None and j < width - 1:
            tap = torch.where(same[j].unsqueeze(-1), tap, 0)
        y = tap * weight[:, j] if y is None else torch.addcmul(y, tap, weight[:, j])
    return y


def causal_conv_step_torch(x, state, weight, bias=None, *, activation=None):
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv_step`."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    seen = torch.cat([state, x.to(state.dtype).unsqueeze(1)], 1)
    state.copy_(seen[:, 1:])
    y = torch.linalg.vecdot(seen.to(dtype), weight.to(dtype).t(), dim=1)
    y = y if bias is None else y + bias
    return (F.silu(y) if activation == "silu" else y).to(x.dtype), state


# ---- ops/causal_conv/__init__.py ------------------------------------------------------------------------------------
# The short depthwise causal convolution that precedes a recurrence, with its own small state.

_OP = Op(
    "causal_conv",
    builtin={"torch": causal_conv_torch, "reference": causal_conv_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.causal_conv_triton"},
    self_check_inputs=self_check_inputs,
)
_STEP = Op(
    "causal_conv_step",
    builtin={"torch": causal_conv_step_torch, "reference": causal_conv_step_reference},
    kernels={"triton": "hf_hybrid_ssm_kernels.causal_conv_triton"},
    self_check_inputs=step_self_check_inputs,
    differentiable=False,
)
ACTIVATIONS = (None, "silu")


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""y_ti = act(bias_i + Σ_j w_ij x_{t-K+1+j, i}): each channel has K taps, the last one on the token itself.

    Args:
        x: (B, L, D).
        weight: (D, K).
        bias: (D,).
        activation: None or "silu".
        initial_state: (B, K - 1, D), the inputs before the first token, oldest first; zero by default.
        seq_idx: (B, L) int, the document of each token; no tap reaches into another document, and `initial_state`
            belongs to the document of the row's first token.
        lengths: (B,) int, real tokens at the front of each row; the final state is taken after them.
        return_final_state: also return the inputs that the next token needs.
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, L, D), and the final state (B, K - 1, D) or None; both in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown activation or backend.
    """
    check_tensor("x", x, (None, None, None), "B, L, D")
    if not x.is_floating_point():
        raise TypeError(f"x must have a floating point dtype, got {x.dtype}.")
    batch, length, _ = x.shape
    _check_filter(x, initial_state, weight, bias, activation)
    check_seq_idx(seq_idx, batch, length)
    check_lengths(lengths, batch, length)
    if length == 0:
        empty = last_inputs(x, weight.shape[1], initial_state, seq_idx, lengths)
        return torch.zeros_like(x), empty if return_final_state else None
    run = _OP.select(x.device.type, x.dtype, backend)
    y, final_state = run(
        x, weight, bias, activation=activation, initial_state=initial_state, seq_idx=seq_idx, lengths=lengths
    )
    return y, final_state if return_final_state else None


def causal_conv_step(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`causal_conv` of one token of each row, without gradients; `state` becomes the one after it, in place.

    Args:
        x: (B, D).
        state: (B, K - 1, D), contiguous: the inputs before it, oldest first.
        weight, bias, activation, backend: as for `causal_conv`.

    Returns:
        y (B, D) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown activation or backend.
    """
    check_tensor("x", x, (None, None), "B, D")
    _check_filter(x, state, weight, bias, activation)
    run = _STEP.select(x.device.type, x.dtype, backend)
    return run(x, state, weight, bias, activation=activation)[0]


def _check_filter(x, state, weight, bias, activation) -> None:
    """What both take, for x (B, [L,] D)."""
    batch, channels = x.shape[0], x.shape[-1]
    check_tensor("weight", weight, (channels, None), "D, K")
    check_tensor("bias", bias, (channels,), "D", optional=True)
    if weight.shape[1] == 0:
        raise ValueError("weight must have at least one tap (K ≥ 1), got K = 0.")
    name = "state" if x.dim() == 2 else "initial_state"
    check_tensor(name, state, (batch, weight.shape[1] - 1, channels), "B, K - 1, D", optional=x.dim() == 3)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}.")
