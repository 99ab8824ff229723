"""A small step on which kernels are checked: complex, with a product of rank one, states that do not fill a vector."""

import torch


def self_check_inputs() -> dict:
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple] = {"u": (2, 3), "state": (2, 2, 3, 22), "skip": (2, 3)}
    shapes |= dict.fromkeys(("change", "input_vector", "output_rows", "left", "right"), (2, 3, 22))
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    # a tuple of tensors would not be cast: every entry is bfloat16 already
    low_rank = tuple(tensors.pop(name).bfloat16().float() for name in ("left", "right"))
    return tensors | {"low_rank": low_rank, "is_complex": True, "silu": True}
