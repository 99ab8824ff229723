"""The short causal convolution, tap by tap."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.self_check import draw


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    (batch, length, channels), width = x.shape, weight.shape[1]
    before = x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state
    seen = torch.cat([before, x], 1).to(dtype)  # token t of this call is seen[:, width - 1 + t]
    if seq_idx is None:
        seq_idx = x.new_zeros(batch, length, dtype=torch.int64)
    document = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], 1)
    outputs = []
    for t in range(length):
        total = torch.zeros_like(seen[:, 0]) if bias is None else bias.to(dtype).expand(batch, -1)
        for j in range(width):
            same = document[:, t + j] == document[:, width - 1 + t]
            total = total + weight[:, j].to(dtype) * seen[:, t + j] * same[:, None]
        outputs.append(total)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    y = F.silu(y) if activation == "silu" else y
    ends = [length] * batch if lengths is None else lengths.tolist()
    states = []
    for row, end in enumerate(ends):
        last = document[row, end : end + width - 1] == document[row, max(width - 2 + end, 0)]
        states.append(seen[row, end : end + width - 1] * last[:, None])
    return y.to(x.dtype), (torch.stack(states) if states else before).to(x.dtype)


def self_check_inputs() -> dict:
    """Longer than a tile, with channels that do not fill one."""
    shapes = {"x": (2, 37, 18), "weight": (18, 4), "bias": (18,), "initial_state": (2, 3, 18)}
    return draw(shapes) | {"activation": "silu"}


def aligned_self_check_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models."""
    shapes = {"x": (2, 37, 32), "weight": (32, 4), "bias": (32,), "initial_state": (2, 3, 32)}
    return draw(shapes) | {"activation": "silu"}


def causal_conv_step_reference(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution of one token x (B, 1, D) after `state`, which is overwritten."""
    y, after = causal_conv_reference(x, weight, bias, activation=activation, initial_state=state)
    return y, state.copy_(after)


def step_self_check_inputs() -> dict:
    """Two rows whose channels do not fill a vector."""
    return draw({"x": (2, 1, 18), "state": (2, 3, 18), "weight": (18, 4), "bias": (18,)}) | {"activation": "silu"}


def aligned_step_self_check_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models."""
    return draw({"x": (2, 1, 32), "state": (2, 3, 32), "weight": (32, 4), "bias": (32,)}) | {"activation": "silu"}
