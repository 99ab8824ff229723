"""The numbers of bits and the sizes of groups that there are kernels for on CPUs."""

import torch

GROUP_SIZES = (32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_grid(bits: int, group_size: int, name: str = "bits") -> None:
    """Raises ValueError for bits or a group size that the kernels do not have."""
    if isinstance(bits, bool) or bits not in (8, 4):
        raise ValueError(f"{name} must be 8 or 4, got {bits!r}.")
    if isinstance(group_size, bool) or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size!r}.")


def fits(in_features: int, bits: int, group_size: int) -> bool:
    """Whether a map of so many inputs can be rounded; 8 bits always."""
    return bits == 8 or in_features % group_size == 0
