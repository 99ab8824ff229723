"""Is a function transform at work, which kernels and hand-written gradients know nothing of?"""

import torch
from torch.autograd import forward_ad


def is_transforming() -> bool:
    """Whether forward-mode differentiation or a `torch.func` transform (grad, jvp, vmap, ...) is active.

    Compiled kernels and autograd functions with a backward of their own have rules for neither; where this is True,
    ops compute by plain torch operations, which have them all. `torch.compile` guards on the answer.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` runs over `tensor`, so that it stands for many values."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False
