"""Does a state still forget as its parameter says, after 200,000 steps of AdamW with a decay near 1?

    python benchmarks/long_training.py

A layer of moving averages (`EMA`) whose decays are 0.99 learns from one with decays of 0.9999, in float32, as
`model.to(bfloat16)` leaves it (its own parameters stay float32), and with all of its parameters in bfloat16. At each
mark: what decay its parameters give, and what decay its state shows over 1,000 tokens without input. It is saved at
each mark in runs/long_training, and the same command continues.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

from benchmarks.timing import machine_arguments, write_results
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.ops.core.rows import Rows

MARKS = (0, 1_000, 10_000, 50_000, 100_000, 200_000)
CHANNELS, LENGTH, RATE, WITHOUT_INPUT = 8, 64, 1e-3, 1_000
FOLDER = Path(__file__).parents[1] / "runs" / "long_training"
MODES = ("float32", "bfloat16, its own parameters float32", "all in bfloat16")


def layer_of(decay: float) -> EMA:
    """Its averages decay by 1 - p a, both the same; what is read of them is their mean."""
    layer, root = EMA(CHANNELS, state_size=1), math.sqrt(1 - decay)
    with torch.no_grad():
        for parameter in (layer.delta, layer.alpha):
            parameter.fill_(math.log(root / (1 - root)))
        for parameter in (layer.beta, layer.gamma):
            parameter.fill_(1.0)
        layer.omega.zero_()
    for name in ("beta", "gamma", "omega"):
        getattr(layer, name).requires_grad_(False)
    return layer


def in_mode(layer: EMA, mode: str) -> EMA:
    if mode == MODES[1]:
        return layer.to(torch.bfloat16)
    if mode == MODES[2]:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(parameter.detach().bfloat16(), parameter.requires_grad))
    return layer


@torch.no_grad()
def decays(layer: EMA) -> dict[str, float]:
    """That of the first channel, as its parameters give it in float64 and as its state shows it."""
    p, a = (torch.sigmoid(value.double()).flatten()[0] for value in (layer.delta, layer.alpha))
    u = torch.zeros(1, 1 + WITHOUT_INPUT, CHANNELS, dtype=torch.float32)
    u[:, 0] = 1.0
    _, before = layer.forward_rows(u[:, :1], None, Rows(return_final_state=True))
    _, after = layer.forward_rows(u[:, 1:], before, Rows(return_final_state=True))
    assert before is not None and after is not None
    shown = (after.double() / before.double()).flatten()[0] ** (1 / WITHOUT_INPUT)
    return {"parameters": 1 - float(p * a), "state": float(shown)}


def trained(mode: str, marks: tuple[int, ...], folder: Path) -> dict[str, dict[str, float]]:
    """Mark → decays."""
    layer, teacher = in_mode(layer_of(0.99), mode), layer_of(0.9999)
    own = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=RATE, weight_decay=0.0, fused=True)
    dtype = torch.float32 if mode == MODES[0] else torch.bfloat16
    random, path = torch.Generator(), folder / f"{mode}.pt"
    step, found = 0, {}
    if path.is_file():
        saved = torch.load(path, weights_only=True)
        step, found = saved["step"], saved["found"]
        layer.load_state_dict(saved["layer"])
        optimizer.load_state_dict(saved["optimizer"])
    for mark in marks:
        for number in range(step, mark):
            u = torch.randn(2, LENGTH, CHANNELS, generator=random.manual_seed(number))
            with torch.no_grad():
                wanted, _ = teacher.forward_rows(u, None, Rows())
            y, _ = layer.forward_rows(u.to(dtype), None, Rows())
            (y.float() - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if str(mark) not in found:
            found[str(mark)], step = decays(layer), mark
            folder.mkdir(parents=True, exist_ok=True)
            state: dict[str, Any] = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step, "found": found}, path)
            print(f"  {mode}, {mark:,} steps: {found[str(mark)]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=MARKS[-1], help="the last mark")
    arguments = machine_arguments(parser, threads=1)
    marks = tuple(mark for mark in MARKS if mark <= arguments.steps)
    settings = {"decay_at_first": 0.99, "decay_of_the_teacher": 0.9999, "learning_rate": RATE}
    modes: dict[str, Any] = {}
    for mode in MODES:
        for last in range(len(marks)):
            modes[mode] = trained(mode, marks[: last + 1], FOLDER)
        write_results("long_training", {"settings": settings, "modes": modes})


if __name__ == "__main__":
    main()
