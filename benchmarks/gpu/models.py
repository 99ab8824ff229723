"""(b) Whole models on the device against the CPU in float32: logits and every gradient, plain, padded and packed."""

import copy
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.families import FAMILIES, ROWS, small
from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import batch_of, random_rows
from hf_hybrid_ssm.ops.core.dispatch import backend

LOGITS, GRADIENTS = 1e-4, 1e-3  # of the largest entry; float32 on both sides, sums in another order


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    for name in FAMILIES:
        for rows in ROWS:
            yield f"{name} {rows}", lambda n=name, r=rows: against_cpu(settings, n, r)


def against_cpu(settings: Settings, name: str, rows: str) -> dict:
    here = small(name, settings).train()
    there = copy.deepcopy(here).cpu()
    inputs = batch_of(rows, random_rows(2, settings.pick(384, 24), here.config.vocab_size))
    placed = {name: value.to(settings.device) for name, value in inputs.items()}
    got = here(**placed, use_cache=False)
    got.loss.backward()
    with backend("torch"):
        want = there(**inputs, use_cache=False)
        want.loss.backward()
    real = inputs["labels"] != -100
    logits = off(got.logits.cpu()[real], want.logits[real])
    gradients = {
        key: off(parameter.grad.cpu(), other.grad)
        for (key, parameter), other in zip(here.named_parameters(), there.parameters())
        if other.grad is not None and parameter.grad is not None
    }
    worst = max(gradients, key=gradients.__getitem__)
    found = {"logits": logits, "gradients": gradients[worst], "worst_gradient": worst}
    if logits > LOGITS or gradients[worst] > GRADIENTS or not torch.isfinite(got.loss):
        found["error"] = f"logits may be off by {LOGITS:g}, gradients by {GRADIENTS:g}"
    return found


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference relative to the largest entry."""
    return float((got - want).detach().abs().max() / want.detach().abs().max().clamp(min=1e-6))
