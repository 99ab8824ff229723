"""(d) A decoded token of every family, Llama and Mamba: eager and as one CUDA graph, some with a compiled model too.

One row, about 125 million weights, bfloat16. The weights' limit is the time of a copy of as many bytes, read once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.families import FAMILIES, large
from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import PEERS, cache_argument, read_prompt

LENGTH = 2048  # slots of a static cache of keys
COMPILED = ("Longhorn", "Llama")  # torch compiles for long, and half an hour is short


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in (*FAMILIES, *PEERS):
        for how, run in (("eager", eager), ("CUDA graph", graph), ("static and compiled", compiled)):
            if run is not compiled or name in COMPILED:
                yield f"{name}, {how}", lambda n=name, h=how, r=run: decoding(settings, n, h, r)


def decoding(settings: Settings, name: str, how: str, prepared: Callable) -> dict:
    model = large(name, settings, "125M", dtype=settings.dtype)
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


def fed(model: PreTrainedModel, cache: Any, call: Callable) -> Callable[[], Any]:
    """One more token; static caches write it over and over to their last slots' end."""
    read_prompt(model, cache)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    arguments = {cache_argument(model): cache, "use_cache": True}
    return lambda: call(token, **arguments)


def eager(model: PreTrainedModel, settings: Settings) -> Callable[[], Any]:
    return fed(model, DynamicCache(config=model.config), model)


def static_cache(model: PreTrainedModel, settings: Settings) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=settings.pick(LENGTH, 64))


def compiled(model: PreTrainedModel, settings: Settings) -> Callable[[], Any]:
    """As `generate(cache_implementation="static")` compiles; a rehearsal traces without a compiler."""
    options = {"mode": "reduce-overhead"} if settings.device == "cuda" else {"backend": "eager"}
    step = fed(model, static_cache(model, settings), torch.compile(model, dynamic=False, **options))

    def run() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return run


def graph(model: PreTrainedModel, settings: Settings) -> Callable[[], Any]:
    """The eager step, captured once; a rehearsal runs it without capturing."""
    step = fed(model, static_cache(model, settings), model)
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
