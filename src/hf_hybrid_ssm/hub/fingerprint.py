"""Weights by their values: two models whose fingerprints agree hold the same numbers."""

import hashlib
from collections.abc import Mapping

import torch


def fingerprint_of(tensors: Mapping[str, torch.Tensor], header: str = "") -> str:
    """SHA-256 over a header, and names, dtypes, shapes and values, in the order of the names.

    It reads all of them: some seconds for each 10 GB, and a copy of one tensor at a time where they are on a device.

    Raises:
        ValueError: one is on the meta device (offloaded, or never loaded).
    """
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, where it has no values to compare: load the model whole.")
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor, as they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
