"""The short causal convolution, tap by tap."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.pages import gathers_pages
from hf_hybrid_ssm.ops.core.self_check import draw


class ConvInputs(NamedTuple):
    """What implementations of the convolution and of its step take, checked, in the order of C.

    Args:
        x, weight, bias: as of `causal_conv`.
        state: (B, K - 1, D); a step overwrites it, where it may be (P, K - 1, D) with `pages`.
        seq_idx, lengths: of `Rows`.
        silu: whether the activation is SiLU.
        pages: of a step, (B,), which of P states each row has.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    state: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    silu: bool = False
    pages: torch.Tensor | None = None


def causal_conv_reference(inputs: ConvInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_hybrid_ssm.ops.causal_conv.causal_conv`; computes in float32, or in float64 for float64 inputs."""
    x, weight, bias, initial_state, seq_idx, lengths, silu, _ = inputs
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
    y = F.silu(y) if silu else y
    ends = [length] * batch if lengths is None else lengths.tolist()
    states = []
    for row, end in enumerate(ends):
        last = document[row, end : end + width - 1] == document[row, max(width - 2 + end, 0)]
        states.append(seen[row, end : end + width - 1] * last[:, None])
    return y.to(x.dtype), (torch.stack(states) if states else before).to(x.dtype)


def _example(length: int, channels: int) -> ConvInputs:
    shapes = {"x": (2, length, channels), "weight": (channels, 4), "bias": (channels,), "state": (2, 3, channels)}
    return ConvInputs(**draw(shapes), silu=True)


# longer than a tile, with channels that do not fill one; rows that begin at multiples of 16 bytes, as those of models
EXAMPLES = (lambda: _example(37, 18), lambda: _example(37, 32))
STEP_EXAMPLES = (lambda: _example(1, 18), lambda: _example(1, 32))


@gathers_pages
def causal_conv_step_reference(inputs: ConvInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution of one token x (B, 1, D) after `state`, which is overwritten."""
    assert inputs.state is not None
    y, after = causal_conv_reference(inputs)
    return y, inputs.state.copy_(after)
