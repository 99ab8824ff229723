"""Implicit self-attention, token by token, in the order of the paper (equations 8 to 11)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops.core.self_check import draw
from hf_hybrid_ssm.ops.legendre_memory.reference import legendre_memory_reference


def implicit_attention_reference(
    x: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    collapse: torch.Tensor,
    collapse_bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
    scale: float,
    theta: float,
    state: torch.Tensor | None,
    lengths: torch.Tensor | None,
    form: str,
    return_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `hf_hybrid_ssm.ops.implicit_attention.implicit_attention`; float32, or float64 for float64 inputs."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    reduced, order = weight.shape[1:]
    m, final = legendre_memory_reference(
        x.to(dtype), weight=None, order=order, theta=theta, state=state, lengths=lengths
    )
    y = []
    for t in range(x.shape[1]):
        q, k, v = (
            activation(weight[i].to(dtype) @ m[:, t] + (0 if bias is None else bias[i].to(dtype).view(reduced, 1)))
            for i in range(3)
        )  # (B, q', D) each
        mixed = (scale * q @ k.transpose(1, 2)).softmax(-1) @ v
        y.append(collapse.to(dtype) @ mixed + (0 if collapse_bias is None else collapse_bias.to(dtype)))
    return (torch.stack(y, 1) if y else x).to(x.dtype), final if return_final_state else None


def self_check_inputs() -> dict:
    """Rows and channels that do not fill a tile or a vector."""
    shapes = {"x": (1, 75, 35), "weight": (3, 5, 6), "bias": (3, 5), "collapse": (5,), "collapse_bias": (1,)}
    return draw(shapes) | _options()


def aligned_self_check_inputs() -> dict:
    """Rows that begin at multiples of 16 bytes, as those of models, and logits of a size that 16 bits hold."""
    shapes = {"x": (1, 75, 32), "weight": (3, 5, 16), "bias": (3, 5), "collapse": (5,), "collapse_bias": (1,)}
    return draw(shapes) | _options() | {"scale": 1 / 32}


def _options() -> dict:
    options = {"theta": 20.0, "activation": F.gelu, "scale": 0.5, "form": "auto"}
    return options | {"state": None, "lengths": None, "return_final_state": True}
