"""Values that the official codes computed (README.md says how), and the comparison with them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]

# Both sides compute in float64, by other routes (FFT, scan, recurrence) and in another order: some thousand roundings
# of 1.1e-16 relative to the largest value.
FLOAT64 = 1e-12
# Values that were stored in float32 on the way, or computed in it: roundings of 6e-8.
FLOAT32 = 2e-6


def golden(name: str, part: str = "") -> Tensors:
    """The tensors of `name`.safetensors whose names begin with `part` and a dot, without these; all without `part`."""
    tensors = load_file(Path(__file__).with_name(f"{name}.safetensors"))
    if not part:
        return tensors
    found = {key.removeprefix(f"{part}."): value for key, value in tensors.items() if key.startswith(f"{part}.")}
    assert found, f"{name}.safetensors has no {part}"
    return found


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value that was wanted."""
    assert actual.shape == wanted.shape, f"{tuple(actual.shape)} is not {tuple(wanted.shape)}"
    scale = wanted.abs().max().item()
    assert scale > 0
    return (actual.detach() - wanted).abs().max().item() / scale


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = FLOAT64) -> None:
    assert actual.dtype == wanted.dtype, f"{actual.dtype} is not {wanted.dtype}"
    assert error(actual, wanted) <= tolerance, f"off by {error(actual, wanted):.1e} of the largest value"


def load(module: torch.nn.Module, tensors: Tensors) -> None:
    """Every parameter of the module from `tensors`, which hold nothing else."""
    module.load_state_dict(tensors)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.detach(), tensors[name].to(parameter.dtype)), name
