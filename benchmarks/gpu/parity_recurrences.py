"""Of `parity`: the linear scans, and the ops of one decoded token, which overwrite their states."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.parity_compared import Inputs, compared, judged, masked, random, relative, row_options
from benchmarks.gpu.settings import Settings
from hf_hybrid_ssm.ops.causal_conv import causal_conv
from hf_hybrid_ssm.ops.core.pages import PagedState
from hf_hybrid_ssm.ops.core.rows import Rows
from hf_hybrid_ssm.ops.linear_scan import ChannelSystem, Transition, diagonal_scan, lti_scan
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

SYSTEMS = [(3, 67, 5, 2, 3), (2, 1024, 256, 1, 32)]  # batch, length, channels, filters, complex states
TINY_SYSTEMS = [(2, 5, 3, 1, 2)]
DIAGONALS = [(3, 67, 5), (2, 2048, 512)]  # batch, length, channels
TINY_DIAGONALS = [(2, 5, 3)]
STEPS = [(1, 1, 1, 2), (3, 130, 17, 4), (8, 1536, 16, 4), (2, 96, 256, 3)]  # batch, channels, states, taps
TINY_STEPS = [(2, 5, 3, 4)]


def cases(settings: Settings, kernel: str) -> Iterator[tuple[str, Callable[[], dict]]]:
    for shape in settings.pick(SYSTEMS, TINY_SYSTEMS):
        for rows in ("plain", "padded", "packed"):
            yield f"lti_scan {shape} {rows}", partial(systems, settings, shape, rows, kernel)
    for shape in settings.pick(DIAGONALS, TINY_DIAGONALS):
        for form in ("real", "complex"):
            for rows in ("plain", "packed"):
                yield f"diagonal_scan {shape} {form} {rows}", partial(diagonal, settings, shape, form, rows, kernel)
    for shape in settings.pick(STEPS, TINY_STEPS):
        for dtype in (torch.float32,) if settings.rehearse else (torch.float32, torch.bfloat16):
            name = f"{shape} {str(dtype).removeprefix('torch.')}"
            yield f"longhorn_step {name}", partial(scan_step, settings, shape, dtype, kernel)
            yield f"causal_conv_step {name}", partial(short_step, settings, shape, dtype, kernel)


def decays(*shape: int) -> torch.Tensor:
    """Complex numbers as pairs (..., 2), most of them near the unit circle."""
    size, angle = random(*shape, seed=1), random(*shape, seed=2)
    return torch.view_as_real(torch.polar(torch.sigmoid(3 + 2 * size), 3 * angle))


def systems(settings: Settings, shape: tuple, rows: str, kernel: str) -> dict:
    batch, length, channels, filters, states = shape
    system = (filters, channels, 2 * states)
    inputs = {"u": random(batch, length, channels, seed=3), "decay": decays(filters, channels, states)}
    inputs |= {"vector": random(*system, seed=4), "output": random(*system, seed=5) / states}
    inputs |= {"skip": random(filters, channels, seed=6), "initial_state": random(batch, *system, seed=7)}

    def scan(u, decay, vector, output, **options: Any) -> tuple:
        return lti_scan(u, ChannelSystem(Transition(decay, "complex"), vector, output), **options)

    options = row_options(rows, batch, length) | {"return_final_state": True}
    op = masked(scan, torch.arange(length) < options.get("lengths", torch.tensor(length)).view(-1, 1))
    return compared(op, inputs, options, settings, torch.float32, backend=kernel, by_blocks=length > 100)


def diagonal(settings: Settings, shape: tuple, form: str, rows: str, kernel: str) -> dict:
    batch, length, channels = shape
    pair, decay = ((), decays(channels)[..., 0]) if form == "real" else ((2,), decays(channels))
    inputs = {"decay": decay, "x": random(batch, length, channels, *pair, seed=3)}
    inputs["initial_state"] = random(batch, channels, *pair, seed=4)

    def scan(decay, x, initial_state, **options: Any) -> tuple:
        if pair:
            decay, x, initial_state = (torch.view_as_complex(part) for part in (decay, x, initial_state))
        found = diagonal_scan(decay, x, initial_state=initial_state, **options)
        return tuple(torch.view_as_real(part) for part in found) if pair else found

    options = row_options(rows, batch, length) | {"return_final_state": True}
    return compared(scan, inputs, options, settings, torch.float32, backend=kernel, by_blocks=length > 100)


def scan_step(settings: Settings, shape: tuple, dtype: torch.dtype, kernel: str) -> dict:
    batch, channels, states, _ = shape
    inputs = {name: random(batch, 1, channels, seed=i) for i, name in enumerate(("x", "beta_logit", "z"))}
    inputs |= {name: random(batch, 1, states, seed=3 + i) for i, name in enumerate("kq")}
    inputs |= {"beta_bias": random(channels, seed=6), "D": random(channels, seed=7)}
    inputs["initial_state"] = random(batch, channels, states, seed=8)
    return step_compared(longhorn_scan, inputs, settings, dtype, kernel)


def short_step(settings: Settings, shape: tuple, dtype: torch.dtype, kernel: str) -> dict:
    batch, channels, _, taps = shape
    inputs = {"x": random(batch, 1, channels, seed=1), "initial_state": random(batch, taps - 1, channels, seed=2)}
    inputs |= {"weight": random(channels, taps, seed=3), "bias": random(channels, seed=4)}
    return step_compared(partial(causal_conv, activation="silu"), inputs, settings, dtype, kernel)


def step_compared(op: Callable, inputs: Inputs, settings: Settings, dtype: torch.dtype, kernel: str) -> dict:
    """A token's outputs and the state after it, on rows and on pages of a memory that has more, in reverse."""
    rounded, batch = {name: t.to(dtype) for name, t in inputs.items()}, inputs["x"].shape[0]
    rows = Rows(return_final_state=True, is_step=True, overwrites_states=True)
    wide = {name: t.to(settings.device, torch.float64, copy=True) for name, t in rounded.items()}
    want = dict(zip(("y", "state"), op(**wide, rows=rows, backend="reference")))
    errors = {}
    for where in ("rows", "pages"):
        given = {name: t.to(settings.device, copy=True) for name, t in rounded.items()}
        state, pages = given.pop("initial_state"), torch.arange(batch, 0, -1, device=settings.device)
        state = state.float() if op is longhorn_scan else state
        held: torch.Tensor | PagedState = state
        if where == "pages":
            state = state.new_zeros(batch + 1, *state.shape[1:]).index_copy(0, pages, state)
            held = PagedState(state, pages)
        y, _ = op(**given, rows=rows, initial_state=held, backend=kernel)
        if settings.only_launches:
            continue
        after = state[pages] if where == "pages" else state
        errors |= {f"y on {where}": relative(y, want["y"]), f"state on {where}": relative(after, want["state"])}
    return judged(errors, dtype) if errors else {}
