"""Small tables that follow from sizes alone: made once a device, since a copy from the host is a wait for it."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch.utils._python_dispatch import _disable_current_modes


def table(make: Callable[..., Sequence]) -> Callable[..., torch.Tensor]:
    """`make(*sizes)`, a sequence of numbers, becomes `get(*sizes, device=...)`, the tensor of them.

    The tensor is shared: it must not be written to. To `torch.compile` it is a constant.
    """

    @lru_cache
    def kept(*sizes: int, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False), _disable_current_modes():
            return torch.tensor(make(*sizes), device=device)

    @torch.compiler.assume_constant_result
    def get(*sizes: int, device: torch.device) -> torch.Tensor:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return torch.tensor(make(*sizes), device=device)  # a fake tensor, for this trace alone
        return kept(*sizes, device=device)

    return get


twice_conjugate = table(lambda: (2.0, -2.0))
"""By which real and imaginary part of c are multiplied so that c · s becomes 2 Re(c s) of the parts of s."""
