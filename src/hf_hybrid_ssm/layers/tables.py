"""A factor that the diagonal mixers share."""

import torch

from hf_hybrid_ssm.ops._core.constants import constant


@constant
def twice_conjugate() -> torch.Tensor:
    """(2,) by which real and imaginary part of c are multiplied so that c · s becomes 2 Re(c s) of the parts of s."""
    return torch.tensor((2.0, -2.0))
