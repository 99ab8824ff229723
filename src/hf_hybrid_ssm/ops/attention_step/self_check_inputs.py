"""A small step on which kernels are checked: shared keys, a row at its start, entries that do not fill a vector."""

import torch


def self_check_inputs() -> dict:
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 4, 18), "k": (2, 2, 18), "v": (2, 2, 5), "keys": (2, 2, 7, 18), "values": (2, 2, 7, 5)}
    shapes |= {"bias": (4, 5), "head_scale": (4,)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    options = {"window": (6, -1), "chunk_size": None, "block": False, "scale": 1.0, "zero_kv_sink": True}
    return tensors | options | {"seen": torch.tensor([3, 40]), "shift": False}
