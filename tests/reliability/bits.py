"""Tensors compared by their bits: zeros by their sign and NaN by its payload too."""

import hashlib
from collections.abc import Mapping

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bits; a tensor without memory equals none."""
    if one.dtype != other.dtype or one.shape != other.shape or one.is_meta or other.is_meta:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of the names and bits."""
    sums = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sums.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums.update(_bytes(tensor).numpy().tobytes())
    return sums.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
