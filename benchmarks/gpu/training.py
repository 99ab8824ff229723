"""(d) A training step of every family against Llama of the same size, and its memory; of some, padded and packed rows.

bfloat16 autocast over float32 weights, AdamW, 16,384 tokens in rows of 2,048.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.families import FAMILIES, ROWS, large
from benchmarks.gpu.settings import Settings
from benchmarks.timing import peak_megabytes_of
from benchmarks.timing.models import batch_of, random_rows, training_step

OF_EVERY_KIND = ("Longhorn", "SPADE")  # with recurrences of their own, which know where rows and documents end
LARGER = ("Longhorn",)


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in FAMILIES:
        for rows in ROWS if name in OF_EVERY_KIND else ROWS[:1]:
            yield f"{name} 125M {rows}", lambda n=name, r=rows: step(settings, n, "125M", r)
    for name in LARGER:
        yield f"{name} 350M plain", lambda n=name: step(settings, n, "350M", "plain")


def step(settings: Settings, name: str, size: str, rows: str) -> dict:
    """In turns with Llama, which reads packed rows as if they were one document and padded ones under a mask."""
    batch, length = settings.pick((8, 2048), (2, 24))
    candidates, weights = {}, {}
    for each in (name, "Llama"):
        model = large(each, settings, size)
        inputs = batch_of(rows, random_rows(batch, length, model.config.vocab_size, settings.device))
        if each == "Llama":
            inputs.pop("seq_idx", None)
        autocast = torch.bfloat16 if settings.device == "cuda" else None
        candidates[each] = training_step(model, inputs, autocast=autocast)
        weights[each] = sum(p.numel() for p in model.parameters())
    found = compare(candidates, settings, rounds=settings.pick(7, 1))
    seconds = found["milliseconds"][name] / 1000
    return {
        **found,
        "tokens_per_second": round(batch * length / seconds),
        "weights": weights,
        "teraflops": round(6 * weights[name] * batch * length / seconds / 1e12, 2),
        "peak_megabytes": {each: round(peak_megabytes_of(run, settings.device)) for each, run in candidates.items()},
    }
