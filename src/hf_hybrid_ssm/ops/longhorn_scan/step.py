"""One token of the Longhorn scan: the state is overwritten, and nothing has a gradient."""

import torch
import torch.nn.functional as F

from hf_hybrid_ssm.ops._core.checks import check_tensor
from hf_hybrid_ssm.ops._core.dispatch import Op


def longhorn_step_reference(x, beta_logit, k, q, state, *, beta_bias=None, D=None, z=None):
    """See `longhorn_step`; computes in float32, or in float64 for float64 inputs."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    value, key, query = x.to(dtype), k.to(dtype).unsqueeze(1), q.to(dtype).unsqueeze(1)
    beta = torch.sigmoid(beta_logit.to(dtype) if beta_bias is None else beta_logit.to(dtype) + beta_bias)
    delta = (beta / (1 + beta * key.square().sum(-1))).unsqueeze(-1)
    state.copy_((1 - delta * key.square()) * state + delta * value.unsqueeze(-1) * key)
    y = (state * query).sum(-1)
    y = y if D is None else y + D * value
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype), state


def longhorn_step_torch(x, beta_logit, k, q, state, *, beta_bias=None, D=None, z=None):
    """See `longhorn_step`."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    value, key = x.to(dtype), k.to(dtype)
    beta = torch.sigmoid(beta_logit.to(dtype) if beta_bias is None else beta_logit + beta_bias)
    # beta / (1 + beta |k|^2), times k
    write = (beta / torch.addcmul(beta.new_ones(()), beta, key.square().sum(-1, keepdim=True))).unsqueeze(-1)
    write = write * key.unsqueeze(1)
    held = state if state.dtype == dtype else state.to(dtype)
    state.copy_(torch.addcmul(held, write, torch.addcmul(value.unsqueeze(-1), held, key.unsqueeze(1), value=-1)))
    y = (state.to(dtype) @ q.to(dtype).unsqueeze(-1)).squeeze(-1)
    y = y if D is None else torch.addcmul(y, value, D.to(dtype))
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype), state


def self_check_inputs() -> dict:
    """Two rows, and neither channels nor states fill a vector."""
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple] = dict.fromkeys(("x", "beta_logit", "z"), (2, 18)) | dict.fromkeys("kq", (2, 21))
    shapes |= {"beta_bias": (18,), "D": (18,), "state": (2, 18, 21)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


_OP = Op(
    "longhorn_step",
    builtin={"torch": longhorn_step_torch, "reference": longhorn_step_reference},
    kernels={
        "native": "hf_hybrid_ssm.ops.longhorn_scan.native",
        "triton": "hf_hybrid_ssm.ops.longhorn_scan.triton_step",
    },
    self_check_inputs=self_check_inputs,
    differentiable=False,
)


def longhorn_step(
    x: torch.Tensor,
    beta_logit: torch.Tensor,
    k: torch.Tensor,
    q: torch.Tensor,
    state: torch.Tensor,
    *,
    beta_bias: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`longhorn_scan` of one token of each row, without gradients; `state` becomes the one after it, in place.

    Args:
        x, beta_logit, z: (B, D), one dtype.
        k, q: (B, N), of the same dtype.
        state: (B, D, N), contiguous, in any floating point dtype; computed with in float32 or wider.
        beta_bias, D: (D,).
        backend: force one implementation (see `hf_hybrid_ssm.ops._core.dispatch`).

    Returns:
        y (B, D) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("state", state, (x.shape[0], x.shape[-1], None), "B, D, N")
    batch, channels, states = state.shape
    check_tensor("x", x, (batch, channels), "B, D")
    check_tensor("beta_logit", beta_logit, (batch, channels), "B, D", like=x)
    check_tensor("k", k, (batch, states), "B, N", like=x)
    check_tensor("q", q, (batch, states), "B, N", like=x)
    check_tensor("z", z, (batch, channels), "B, D", like=x, optional=True)
    check_tensor("beta_bias", beta_bias, (channels,), "D", optional=True)
    check_tensor("D", D, (channels,), "D", optional=True)
    run = _OP.select(x.device.type, x.dtype, backend)
    return run(x, beta_logit, k, q, state, beta_bias=beta_bias, D=D, z=z)[0]
