"""Implicit self-attention, token by token, in the order of the paper (equations 8 to 11)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.self_check import draw
from hf_hybrid_ssm.ops.legendre_memory.reference import MemoryInputs, legendre_memory_reference


class ImplicitInputs(NamedTuple):
    """What implementations of `implicit_attention` take, checked; every row is one document, and padding is 0."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    collapse: torch.Tensor
    collapse_bias: torch.Tensor | None
    theta: float
    scale: float
    state: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    returns_state: bool = True
    form: str = "auto"
    activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu

    @property
    def order(self) -> int:
        """q of the memory."""
        return self.weight.shape[2]

    def memory(self, x: torch.Tensor, weight: torch.Tensor | None) -> MemoryInputs:
        """Of x, these inputs in another dtype perhaps, what the memory's implementations take."""
        return MemoryInputs(x, weight, self.order, self.theta, self.state, self.lengths)


def implicit_attention_reference(inputs: ImplicitInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; float32, or float64 for float64 inputs."""
    x, weight, bias, collapse, collapse_bias, _, scale, *_ = inputs
    dtype = torch.promote_types(x.dtype, torch.float32)
    reduced = weight.shape[1]
    m, final = legendre_memory_reference(inputs.memory(x.to(dtype), None))
    y = []
    for t in range(x.shape[1]):
        q, k, v = (
            inputs.activation(
                weight[i].to(dtype) @ m[:, t] + (0 if bias is None else bias[i].to(dtype).view(reduced, 1))
            )
            for i in range(3)
        )  # (B, q', D) each
        mixed = (scale * q @ k.transpose(1, 2)).softmax(-1) @ v
        y.append(collapse.to(dtype) @ mixed + (0 if collapse_bias is None else collapse_bias.to(dtype)))
    return (torch.stack(y, 1) if y else x).to(x.dtype), final if inputs.returns_state else None


def _example(channels: int, order: int, scale: float) -> ImplicitInputs:
    shapes = {"x": (1, 75, channels), "weight": (3, 5, order), "bias": (3, 5), "collapse": (5,), "collapse_bias": (1,)}
    return ImplicitInputs(**draw(shapes), theta=20.0, scale=scale)


EXAMPLES = (
    lambda: _example(35, 6, 0.5),  # rows and channels that do not fill a tile or a vector
    # rows that begin at multiples of 16 bytes, as those of models, and logits of a size that 16 bits hold
    lambda: _example(32, 16, 1 / 32),
)
