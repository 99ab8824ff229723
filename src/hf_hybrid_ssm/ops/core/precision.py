"""How torch multiplies float32 matrices, a setting of the process: in full, or rounded to TF32 or bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


@contextmanager
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
