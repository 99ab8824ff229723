"""Tensors compared by their bits: zeros by their sign and NaN by its payload too."""

import hashlib
from collections.abc import Mapping

import torch
from safetensors.torch import save


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bits; a tensor without memory equals none."""
    if one.dtype != other.dtype or one.shape != other.shape or one.is_meta or other.is_meta:
        return False
    return torch.equal(*(tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the names and bits."""
    return hashlib.sha256(save({name: tensor.detach().clone() for name, tensor in tensors.items()})).hexdigest()
