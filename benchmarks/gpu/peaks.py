"""(b) What the card can do: bandwidth of a copy, and rate of matrix products."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.settings import Settings
from benchmarks.timing import paired_seconds


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    yield "copy", lambda: copy(settings)
    dtypes = (torch.bfloat16, torch.float32) if settings.device == "cuda" else (torch.float32,)
    for dtype in dtypes:
        yield f"product {str(dtype).removeprefix('torch.')}", lambda dtype=dtype: product(settings, dtype)


def copy(settings: Settings) -> dict:
    source = torch.zeros(settings.pick(2**30, 2**16), dtype=torch.int8, device=settings.device)
    target = torch.zeros_like(source)
    seconds = paired_seconds({"copy": lambda: target.copy_(source)}, rounds=settings.rounds, device=settings.device)
    return {"gigabytes_per_second": round(2 * source.numel() / seconds["copy"] / 1e9, 1)}


def product(settings: Settings, dtype: torch.dtype) -> dict:
    size = settings.pick(8192, 64)
    a, b = (torch.randn(size, size, device=settings.device).to(dtype) for _ in range(2))
    seconds = paired_seconds({"product": lambda: a @ b}, rounds=settings.rounds, device=settings.device)
    return {"teraflops": round(2 * size**3 / seconds["product"] / 1e12, 2)}
