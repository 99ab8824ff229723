"""A few rows times a weight of 8 bits, with one scale for each of its rows: y = x (codes · scale)ᵀ, of decoding.

Compiled and exported programs have it inside of another op, `hf_hybrid_ssm.layers.low_bit_kernels.low_bit_product`.
"""

import torch

from hf_hybrid_ssm.ops.core.checks import check_tensor
from hf_hybrid_ssm.ops.core.dispatch import Op
from hf_hybrid_ssm.ops.int8_product.reference import EXAMPLES, Int8Inputs, int8_product_reference
from hf_hybrid_ssm.ops.int8_product.torch_backend import int8_product_torch

_OP = Op(
    "int8_product",
    builtin={"torch": int8_product_torch, "reference": int8_product_reference},
    kernels={"native": "hf_hybrid_ssm.ops.int8_product.native"},
    examples=EXAMPLES,
    opaque=("torch",),
    differentiable=False,
)


def int8_product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """y = x (codes · scale)ᵀ, summed in float32 or wider; nothing has a gradient.

    Args:
        x: (R, I), few rows: the time grows with them.
        codes: int8 (O, I), contiguous, at any address.
        scales: (O,), in the dtype of x.
        backend: force one implementation (see `hf_hybrid_ssm.ops.core.dispatch`).

    Returns:
        y (R, O) in the dtype of x.

    Raises:
        TypeError, ValueError: an argument of wrong type, dtype, shape or device; an unknown or unusable backend.
    """
    check_tensor("x", x, (None, None), "R, I")
    check_tensor("codes", codes, (None, x.shape[1]), "O, I", beside=x)
    if codes.dtype != torch.int8:
        raise TypeError(f"codes must be int8, got {codes.dtype}.")
    check_tensor("scales", scales, (codes.shape[0],), "O", like=x)
    return _OP.select(x.device.type, x.dtype, backend)(Int8Inputs(x, codes, scales))[0]
