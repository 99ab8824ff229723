"""One token of the short convolution: the state is overwritten, and nothing has a gradient."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops._core.checks import check_tensor
from hf_hybrid_ssm.ops._core.dispatch import Op

ACTIVATIONS = (None, "silu")


def causal_conv_step_reference(x, state, weight, bias=None, *, activation=None):
    """See `causal_conv_step`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros_like(x, dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape)
    inputs = [*state.to(dtype).clone().unbind(1), x.to(dtype)]
    for lag, seen in enumerate(inputs):
        y = y + weight[:, lag].to(dtype) * seen
    for slot, seen in enumerate(inputs[1:]):
        state[:, slot] = seen
    return (F.silu(y) if activation == "silu" else y).to(x.dtype), state


def causal_conv_step_torch(x, state, weight, bias=None, *, activation=None):
    """See `causal_conv_step`."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    seen = torch.cat([state, x.to(state.dtype).unsqueeze(1)], 1)
    state.copy_(seen[:, 1:])
    y = torch.linalg.vecdot(seen.to(dtype), weight.to(dtype).t(), dim=1)
    y = y if bias is None else y + bias
    return (F.silu(y) if activation == "silu" else y).to(x.dtype), state


def self_check_inputs() -> dict:
    """Two rows whose channels do not fill a vector."""
    random = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 18), "state": (2, 3, 18), "weight": (18, 4), "bias": (18,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()} | {"activation": "silu"}


_OP = Op(
    "causal_conv_step",
    builtin={"torch": causal_conv_step_torch, "reference": causal_conv_step_reference},
    kernels={"native": "hf_hybrid_ssm.ops.causal_conv.native", "triton": "hf_hybrid_ssm.ops.causal_conv.triton_step"},
    self_check_inputs=self_check_inputs,
    differentiable=False,
)


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
        weight: (D, K).
        bias: (D,).
        activation: None or "silu".
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, D) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown activation or backend.
    """
    check_tensor("x", x, (None, None), "B, D")
    check_tensor("weight", weight, (x.shape[1], None), "D, K")
    check_tensor("state", state, (x.shape[0], weight.shape[1] - 1, x.shape[1]), "B, K - 1, D")
    check_tensor("bias", bias, (x.shape[1],), "D", optional=True)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, ACTIVATIONS))}.")
    run = _OP.select(x.device.type, x.dtype, backend)
    return run(x, state, weight, bias, activation=activation)[0]
