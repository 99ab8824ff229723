"""One token of diagonal linear systems, and of diagonal ones plus a product of rank one, with their outputs."""

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.linear_scan.reference import STEP_EXAMPLES, StepInputs, linear_step_reference
from hf_hybrid_ssm.ops.linear_scan.torch_backend import linear_step_torch

_OP = Op(
    "linear_step",
    builtin={"torch": linear_step_torch, "reference": linear_step_reference},
    kernels={"native": "hf_hybrid_ssm.ops.linear_scan.native_step"},
    examples=STEP_EXAMPLES,
    differentiable=False,
)


def lti_token(
    u: torch.Tensor,
    state: torch.Tensor,
    decay_minus_one: torch.Tensor,
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

    What `lti_scan` computes of a step, from constants made for it: what a token changes is small where memories are
    long, and its digits would be lost in a factor near 1. `state` becomes s in place; nothing has a gradient.

    Args:
        u: (B, 1, D).
        state: (B, F, D, N).
        decay_minus_one, input_vector: a and b, (F, D, N), all constants in one dtype, float32 or float64; with
            `is_complex` the N numbers are N / 2 pairs of a real and an imaginary part, and a s is a complex product
            (all others real).
        output_rows: c, (F, D, N); without it there is no output.
        low_rank: l and r, (F, D, N) each.
        skip: d, (F, D).
        silu: act is SiLU instead of nothing.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, 1, F, D) in the dtype of u, or None.

    Raises:
        TypeError, ValueError: an argument of wrong type or shape; an unknown or unusable backend.
    """
    check_tensor("u", u, (None, 1, None), "B, 1, D")
    check_tensor("state", state, (u.shape[0], None, u.shape[2], None), "B, F, D, N", beside=u)
    shape = tuple(state.shape[1:])
    check_tensor("decay_minus_one", decay_minus_one, shape, "F, D, N", beside=u)
    if is_complex and shape[2] % 2:
        raise ValueError(f"is_complex needs an even number of real state dimensions, got N = {shape[2]}.")
    check_tensor("input_vector", input_vector, shape, "F, D, N", like=decay_minus_one)
    check_tensor("output_rows", output_rows, shape, "F, D, N", like=decay_minus_one, optional=True)
    check_tensor("skip", skip, shape[:2], "F, D", like=decay_minus_one, optional=True)
    left, right = low_rank or (None, None)
    if low_rank is not None:
        check_tensor("low_rank[0]", left, shape, "F, D, N", like=decay_minus_one)
        check_tensor("low_rank[1]", right, shape, "F, D, N", like=decay_minus_one)
    run = _OP.select(u.device.type, decay_minus_one.dtype, backend)
    a, b, c = decay_minus_one, input_vector, output_rows
    return run(StepInputs(u, state, a, b, left, right, c, skip, is_complex, silu))[0]
