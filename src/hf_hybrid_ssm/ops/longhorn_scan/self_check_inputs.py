"""A small Longhorn scan on which kernels are checked: longer than a block, with channels that do not fill a tile."""

import torch


def self_check_inputs() -> dict:
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple] = dict.fromkeys(("x", "beta_logit", "z"), (1, 67, 18)) | dict.fromkeys("kq", (1, 67, 16))
    shapes |= {"beta_bias": (18,), "D": (18,), "initial_state": (1, 18, 16)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
