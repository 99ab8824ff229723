"""(e) A short training run of some families on text, in bfloat16 on the device and in float32 on a CPU: the curves.

The text is the topics of Python's own help, as bytes, so that nothing has to be fetched.
"""

import itertools
from collections.abc import Callable, Iterator
from pydoc_data.topics import topics

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.settings import Settings
from benchmarks.timing.models import build

BATCH, LENGTH, STEPS, EVERY = 8, 256, 120, 10
RATE = 2e-3
LEARNERS = ("Longhorn", "SPADE", "LMU-ISA")  # those with kernels of their own: the CPU's run is slow
GAP = 0.05  # how far the mean of the last quarter may lie from the CPU's, as a share


def cases(settings: Settings) -> Iterator[tuple[str, Callable[[], dict]]]:
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    for name in LEARNERS:
        yield name, lambda n=name: curves(settings, n, text)


def curves(settings: Settings, name: str, text: torch.Tensor) -> dict:
    here = curve(name, settings, text, settings.device, torch.bfloat16)
    there = curve(name, settings, text, "cpu", None)
    last = len(here) - len(here) // 4
    ends = [sum(losses[last - 1 :]) / len(losses[last - 1 :]) for losses in (here, there)]
    found = {
        "bfloat16": means(here),
        "float32_cpu": means(there),
        "last_quarter": [round(end, 4) for end in ends],
        "gap": round(abs(ends[0] / ends[1] - 1), 4),
    }
    if not settings.rehearse and (found["gap"] > GAP or here[-1] > 0.8 * here[0]):
        found["error"] = "the curve does not fall as the CPU's does"
    return found


def curve(name: str, settings: Settings, text: torch.Tensor, device: str, autocast: torch.dtype | None) -> list[float]:
    """The loss of every step; the same model and batches on every device."""
    width, depth = settings.pick((128, 2), (32, 1))
    model = build(name, width, depth, vocabulary=256, window=settings.pick(64, 8)).to(device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.1)
    steps = settings.pick(STEPS, 3)
    losses = [
        learn(model, optimizer, rows.to(device), autocast) for rows in itertools.islice(batches(text, settings), steps)
    ]
    return torch.stack(losses).float().tolist()


def learn(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rows: torch.Tensor, autocast) -> torch.Tensor:
    with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
        loss = model(rows, labels=rows, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def batches(text: torch.Tensor, settings: Settings) -> Iterator[torch.Tensor]:
    batch, length = settings.pick((BATCH, LENGTH), (2, 24))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(text) - length, (batch,), generator=generator)
        yield text[starts.unsqueeze(1) + torch.arange(length)]


def means(losses: list[float]) -> list[float]:
    """Of every few steps."""
    groups = [losses[first : first + EVERY] for first in range(0, len(losses), EVERY)]
    return [round(sum(group) / len(group), 4) for group in groups]
