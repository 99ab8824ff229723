"""Small scans on which kernels are checked: longer than a block, with documents' states before them, decays near 1."""

import torch


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _decays(*shape: int) -> torch.Tensor:
    """Complex numbers inside of the unit circle as pairs (..., 2), most of them near it."""
    return torch.view_as_real(torch.polar(torch.sigmoid(3 + 2 * _draw(*shape, seed=1)), 3 * _draw(*shape, seed=2)))


def diagonal_inputs() -> dict:
    tensors = {"decay": _decays(5), "x": _draw(2, 75, 5, 2, seed=3), "initial_state": _draw(2, 5, 2, seed=4)}
    return tensors | {"seq_idx": None}


def channel_inputs() -> dict:
    filters, channels, states = 2, 3, 6
    tensors = {"u": _draw(2, 75, channels, seed=3), "decay": _decays(filters, channels, states // 2)}
    tensors |= {name: _draw(filters, channels, states, seed=seed) for seed, name in enumerate(("vector", "output"), 4)}
    tensors |= {"skip": _draw(filters, channels, seed=6), "initial_state": _draw(2, filters, channels, states, seed=7)}
    options = {"seq_idx": None, "lengths": None, "stride": None, "positions": None, "form": "complex"}
    return tensors | options | {"return_final_state": True}
