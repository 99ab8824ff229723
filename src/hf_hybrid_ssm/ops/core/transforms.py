"""What may be active around an op: autocast, how float32 matrices are multiplied, and function transforms, for which
kernels have no rules."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import forward_ad


def is_transforming() -> bool:
    """Whether forward-mode differentiation or a `torch.func` transform (grad, jvp, vmap, ...) is active.

    Compiled kernels and autograd functions with a backward of their own have no rules for them; if this is True, ops
    use plain torch operations, which do. `torch.compile` guards on the answer.
    """
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def is_exporting() -> bool:
    """Whether `torch.export` traces; torch 2.6 cannot be asked."""
    return getattr(torch.compiler, "is_exporting", lambda: False)()


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether `torch.vmap` runs over `tensor`, so that it stands for many values."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def is_autocast_enabled(device_type: str) -> bool:
    """Whether autocast is active on devices of this type; torch raises when asked about "meta", which has none."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """No autocast on a device of this type. `torch.compile` guards on whether there is any, and keeps on disk only
    what it made of a graph that switches none off; an exported program may run in either."""
    runs_in_either = is_exporting() or (torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling())
    if device_type == "meta" or not (runs_in_either or is_autocast_enabled(device_type)):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


# -- products of float32 matrices, a setting of the process: in full, or rounded to TF32 or bfloat16 ------------------

FULL = ("ieee", "none", "highest")
# newer versions of torch have a setting for each library beside the one for all
SETTINGS: tuple[Any, ...] = tuple(
    setting
    for setting in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if hasattr(setting, "fp32_precision")
)


def float32_precision() -> tuple[str, ...]:
    """The settings as they are, to be compared."""
    if SETTINGS:
        return tuple(setting.fp32_precision for setting in SETTINGS)
    return (torch.get_float32_matmul_precision(),)


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Products of float32 matrices keep float32's accuracy inside; the user's settings come back after it."""
    before = float32_precision()
    if all(precision in FULL for precision in before):
        yield
        return
    try:
        for_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # the settings were made one by one, and no word says them all
        for_all = "highest"
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(for_all)
        for setting, precision in zip(SETTINGS, before):
            if setting.fp32_precision != precision:
                setting.fp32_precision = precision
