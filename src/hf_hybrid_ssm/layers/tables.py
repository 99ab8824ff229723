"""A constant factor of the diagonal mixers."""

import torch

from hf_hybrid_ssm.ops.core.constants import constant


@constant
def twice_conjugate() -> torch.Tensor:
    """(2, -2): the factors of the real and imaginary parts of c, whose products with those of s sum to 2 Re(c s)."""
    return torch.tensor((2.0, -2.0))
