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


def lti_token(inputs: StepInputs, *, backend: str | None = None) -> torch.Tensor | None:
    r"""s = s + a s - l (r · s) + b u,  y = act(c · s + d u).

    What `lti_scan` computes of a step, from constants made for it. `inputs.state` becomes s in place; nothing has a
    gradient.

    Args:
        inputs: the token, s, a, b, l, r, c and d.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (B, 1, F, D) in the dtype of u, or None.

    Raises:
        TypeError, ValueError: an input of wrong type or shape; an unknown or unusable backend.
    """
    u, state, decay, input_vector, left, right, output_rows, skip, is_complex, _ = inputs
    check_tensor("u", u, (None, 1, None), "B, 1, D")
    check_tensor("state", state, (u.shape[0], None, u.shape[2], None), "B, F, D, N", beside=u)
    shape = tuple(state.shape[1:])
    check_tensor("decay_minus_one", decay, shape, "F, D, N", beside=u)
    if is_complex and shape[2] % 2:
        raise ValueError(f"is_complex needs an even number of real state dimensions, got N = {shape[2]}.")
    check_tensor("input_vector", input_vector, shape, "F, D, N", like=decay)
    if (left is None) != (right is None):
        raise ValueError("left and right are the two sides of one product: give both or neither.")
    check_tensor("left", left, shape, "F, D, N", like=decay, optional=True)
    check_tensor("right", right, shape, "F, D, N", like=decay, optional=True)
    check_tensor("output_rows", output_rows, shape, "F, D, N", like=decay, optional=True)
    check_tensor("skip", skip, shape[:2], "F, D", like=decay, optional=True)
    return _OP.select(u.device.type, decay.dtype, backend)(inputs)[0]
