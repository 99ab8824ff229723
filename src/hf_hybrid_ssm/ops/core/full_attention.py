"""Plain full attention (`scaled_dot_product_attention`)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_hybrid_ssm.ops.core.dispatch import forced_backend
from hf_hybrid_ssm.ops.core.transforms import is_transforming


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """`scaled_dot_product_attention`, by its equation inside a transform and with the backend "reference": the fused
    kernels have no tangents and no second derivatives."""
    if not is_transforming() and forced_backend() != "reference":
        return F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)
