"""(c) One training step and one decoded token of every family while waiting for the GPU is an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import DynamicCache

from benchmarks.gpu.families import FAMILIES, ROWS, small
from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import batch_of, random_rows


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in FAMILIES:
        for rows in ROWS:
            yield f"{name} training {rows}", lambda n=name, r=rows: training(settings, n, r)
        for rows in ROWS[:2]:
            yield f"{name} decoding {rows}", lambda n=name, r=rows: decoding(settings, n, r)


@contextmanager
def waiting_is_an_error(settings: Settings) -> Iterator[None]:
    """On CUDA, whatever makes the CPU wait for the GPU raises; a rehearsal only runs the code."""
    if settings.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if settings.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def training(settings: Settings, name: str, rows: str) -> dict:
    """The second step: the first compiles kernels, checks them and fills tables."""
    model = small(name, settings).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    inputs = batch_of(rows, random_rows(2, settings.pick(384, 24), model.config.vocab_size, settings.device))

    def step() -> None:
        with torch.autocast(settings.device, dtype=torch.bfloat16, enabled=settings.device == "cuda"):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with waiting_is_an_error(settings):
        step()
    return {"syncs": 0 if settings.device == "cuda" else "not looked for on a CPU"}


@torch.inference_mode()
def decoding(settings: Settings, name: str, rows: str) -> dict:
    """The second token after a prompt; with a mask, as `generate` passes it."""
    model = small(name, settings)
    length = settings.pick(64, 12)
    ids = random_rows(2, length + 2, model.config.vocab_size, settings.device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    cache = DynamicCache(config=model.config)

    def feed(first: int, last: int) -> None:
        options = {"attention_mask": mask[:, :last]} if rows == "padded" else {}
        model(ids[:, first:last], cache=cache, use_cache=True, **options)

    feed(0, length)
    feed(length, length + 1)
    with waiting_is_an_error(settings):
        feed(length + 1, length + 2)
    return {"syncs": 0 if settings.device == "cuda" else "not looked for on a CPU"}
