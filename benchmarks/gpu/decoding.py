"""(c) A decoded token of some families and Llama: eager, and as one CUDA graph.

One row, about 125 million weights, bfloat16. The weights' limit is the time of a copy of as many bytes, read once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.families import large
from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import cache_argument, read_prompt

DECODED = ("Longhorn", "BST SH", "SPADE", "Llama")
LENGTH = 2048  # slots of a static cache of keys


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in DECODED:
        for how, prepared in (("eager", eager), ("CUDA graph", graph)):
            yield f"{name}, {how}", partial(decoding, settings, name, how, prepared)


def decoding(settings: Settings, name: str, how: str, prepared: Callable) -> dict:
    model = large(name, settings, dtype=settings.dtype)
    steps = settings.pick(16, 1)
    step = prepared(model, settings)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                step()

    milliseconds = compare({how: run}, settings)["milliseconds"][how] / steps
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "milliseconds_per_token": round(milliseconds, 4),
        "bytes_of_weights": weights,
        "gigabytes_per_second": round(weights / milliseconds / 1e6, 1),
    }


def fed(model: PreTrainedModel, cache: Any) -> Callable[[], Any]:
    """One more token; static caches write it over and over to their last slots' end."""
    read_prompt(model, cache)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    arguments = {cache_argument(model): cache, "use_cache": True}
    return lambda: model(token, **arguments)


def eager(model: PreTrainedModel, settings: Settings) -> Callable[[], Any]:
    return fed(model, DynamicCache(config=model.config))


def graph(model: PreTrainedModel, settings: Settings) -> Callable[[], Any]:
    """The eager step, captured once; a rehearsal runs it without capturing."""
    step = fed(model, StaticCache(config=model.config, max_cache_len=settings.pick(LENGTH, 64)))
    if settings.device != "cuda":
        return step
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()

    def replay(kept_alive: Callable = step) -> None:
        """The graph reads and writes the cache that the step holds."""
        captured.replay()

    return replay
