"""(d) A training step of every family against Llama of the same size, and its memory.

bfloat16 autocast over float32 weights, AdamW, 16,384 tokens in rows of 2,048.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.comparing import compare
from benchmarks.gpu.families import large
from benchmarks.gpu.settings import Settings
from benchmarks.timing import peak_megabytes_of
from benchmarks.timing.models import batch_of, random_rows, training_step

TRAINED = ("Longhorn", "SPADE", "BST SH", "LMU-ISA")


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in TRAINED:
        yield f"{name} 125M", partial(step, settings, name)


def step(settings: Settings, name: str) -> dict:
    """In turns with Llama."""
    batch, length = settings.pick((8, 2048), (2, 24))
    candidates, weights = {}, {}
    for each in (name, "Llama"):
        model = large(each, settings)
        inputs = batch_of("plain", random_rows(batch, length, model.config.vocab_size, settings.device))
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
