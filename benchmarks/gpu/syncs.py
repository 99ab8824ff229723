"""(c) One training step and one decoded token of every family while waiting for the GPU is an error.

Packed rows are one row with `cu_seq_lens_q`, whose shape says how many documents there are: `seq_idx` says it by its
values alone, for which BST's context states wait.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers import DynamicCache

from benchmarks.gpu.families import FAMILIES, ROWS, small
from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import batch_of, random_rows

WAITS = {"LMU-ISA training packed": "documents are taken apart, and their number is the shape of what follows"}
"""What cannot do without, and why; it is an error if one of them no longer waits."""


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in FAMILIES:
        for rows in ROWS:
            run = partial(training, settings, name, rows)
            yield f"{name} training {rows}", partial(expected, WAITS.get(f"{name} training {rows}"), run, settings)
        for rows in ROWS[:2]:
            yield f"{name} decoding {rows}", lambda n=name, r=rows: decoding(settings, n, r)


def expected(reason: str | None, run: Callable[[], dict], settings: Settings) -> dict:
    """The figures of a case; where there is a reason to wait, what it says when it does."""
    if reason is None or settings.device != "cuda":
        return run()
    try:
        return run() | {"error": f"this was to wait ({reason}), and does not"}
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return {"waits": reason}


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
    inputs = inputs_of(rows, settings, model.config.vocab_size)

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


def inputs_of(rows: str, settings: Settings, vocabulary: int) -> dict[str, torch.Tensor]:
    length = settings.pick(384, 24)
    ids = random_rows(2, length, vocabulary, settings.device)
    if rows != "packed":
        return batch_of(rows, ids)
    ends = torch.tensor([0, length // 4, length, length + length // 2, 2 * length], dtype=torch.int32)
    return {"input_ids": ids.view(1, -1), "labels": ids.view(1, -1), "cu_seq_lens_q": ends.to(settings.device)}


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
