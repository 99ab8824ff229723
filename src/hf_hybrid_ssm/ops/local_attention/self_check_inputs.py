"""Local attention on which a kernel is checked: more than one block, a bias, and zeros before the row."""

import torch


def self_check_inputs() -> dict:
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 2, 150, 16), "k": (1, 2, 150, 16), "v": (1, 2, 150, 16), "bias": (2, 9)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    options = {"window": (12, -1), "chunk_size": None, "scale": 0.25, "zero_kv_sink": True, "dropout": 0.0}
    return tensors | options | {"state": None, "seq_idx": None, "lengths": None}
