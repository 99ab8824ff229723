"""Every recurrence of the package alone, over very many tokens: how large its state gets, and how far it drifts."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.layers.mixers.s5 import S5
from hf_hybrid_ssm.layers.mixers.state_space import StateSpaceMixer
from hf_hybrid_ssm.models.lmu_isa.lmu import LMU
from hf_hybrid_ssm.ops.legendre_memory import transition
from hf_hybrid_ssm.ops.longhorn_scan import longhorn_scan

CHANNELS, STATES, PIECE = 4, 8, 1000
MOST_GROWTH = 2.0
# (input, state before) → (outputs of all tokens, state after)
Piece = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence in pieces of tokens.

    Args:
        inputs: channels of the input it takes.
        build: dtype → the function that advances it by a piece; the same parameters in each dtype.
        memory: tokens after which it has forgotten all but 1 / e, 1 / (1 - |largest eigenvalue|).
    """

    inputs: int
    build: Callable[[torch.dtype], Piece]
    memory: Callable[[], float]


def _mixer(make: Callable[[], Mixer]) -> Recurrence:
    def seeded() -> Mixer:
        torch.manual_seed(0)
        return make().requires_grad_(False)

    def build(dtype: torch.dtype) -> Piece:
        mixer = seeded().to(dtype)

        def advance(u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if u.shape[1] == 1 and state is not None:  # as in decoding
                return mixer.step(u[:, 0], state)  # type: ignore[return-value]
            y, state = mixer(u, initial_state=state, return_final_state=True)
            return y, state

        return advance

    return Recurrence(CHANNELS, build, lambda: 1 / (1 - _largest_eigenvalue(seeded())))


@torch.no_grad()
def _largest_eigenvalue(mixer: Mixer) -> float:
    """Of one step, in float64."""
    if isinstance(mixer, LMU):
        values = torch.linalg.eigvals(transition(mixer.order, mixer.theta))
    elif isinstance(mixer, S5):
        values = mixer._discretised(torch.float64)[0]
    else:
        assert isinstance(mixer, StateSpaceMixer)
        step = mixer.dynamics(torch.float64)[0]
        values = step.value
        if step.form != "real":
            values = torch.linalg.eigvals(values) if step.form == "dense" else torch.view_as_complex(values)
    return float(values.abs().max())


def _pushed(make: Callable[[], Mixer], **shifts: float) -> Callable[[], Mixer]:
    """A mixer whose parameters training has moved a long way."""

    def build() -> Mixer:
        mixer = make()
        with torch.no_grad():
            for name, shift in shifts.items():
                mixer.get_parameter(name).add_(shift)
        return mixer

    return build


def _longhorn(key_size: float) -> Recurrence:
    """Values, step sizes, keys and queries are all input, as in a block.

    h_t = (1 - w) h_{t-1} + w x_t / k_t with w = Δ_t k_t²: the state stays between what it was and x_t / k_t.
    """

    def build(dtype: torch.dtype) -> Piece:
        def advance(u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x, dt, k, q = u.split([CHANNELS, CHANNELS, STATES, STATES], dim=-1)
            parts: dict[str, Any] = {"initial_state": state, "return_final_state": True}
            return longhorn_scan(x.contiguous(), dt.contiguous(), key_size * k, q.contiguous(), **parts)

        return advance

    square = key_size**2
    return Recurrence(2 * CHANNELS + 2 * STATES, build, lambda: (1 + 0.5 * STATES * square) / (0.5 * square))


RECURRENCES = {
    "Longhorn": _longhorn(1.0),
    "Longhorn, keys of 0.01": _longhorn(0.01),
    "Longhorn, keys of 100": _longhorn(100.0),
    "S4": _mixer(lambda: S4(CHANNELS, state_size=STATES)),
    "S4, steps 20 times as long": _mixer(_pushed(lambda: S4(CHANNELS, state_size=STATES), log_dt=3.0)),
    "S4, 50 times less decay": _mixer(_pushed(lambda: S4(CHANNELS, state_size=STATES), A_log_real=-3.9)),
    "S4D, zero-order hold": _mixer(lambda: S4D(CHANNELS, state_size=STATES)),
    "S4D, bilinear": _mixer(lambda: S4D(CHANNELS, state_size=STATES, discretization="bilinear")),
    "S4D, 50 times less decay": _mixer(_pushed(lambda: S4D(CHANNELS, state_size=STATES), A_log_real=-3.9)),
    "S5": _mixer(lambda: S5(CHANNELS, state_size=STATES, blocks=2)),
    "S5, eigenvalues pushed over the axis": _mixer(
        _pushed(lambda: S5(CHANNELS, state_size=STATES, blocks=2), A_real=2.0)
    ),
    "LMU, window of 350": _mixer(lambda: LMU(CHANNELS, order=STATES, theta=350.0)),
    "LMU, order 64": _mixer(lambda: LMU(CHANNELS, order=64, theta=350.0)),
    "EMA": _mixer(lambda: EMA(CHANNELS, state_size=STATES)),
    "EMA, almost no damping": _mixer(_pushed(lambda: EMA(CHANNELS, state_size=STATES), alpha=-7.0)),
}
INPUTS: dict[str, Callable[[int, int, torch.Generator], torch.Tensor]] = {
    "noise": lambda length, width, generator: torch.randn(1, length, width, generator=generator),
    "ones": lambda length, width, generator: torch.ones(1, length, width),
}


def piece_lengths(tokens: int, piece: int = PIECE) -> Iterator[int]:
    """Single tokens first, then tens, hundreds, ... up to `piece`: each decade is looked at."""
    done, length = 0, 1
    while done < tokens:
        if done >= 10 * length:
            length = min(10 * length, piece)
        length = min(length, tokens - done)
        yield length
        done += length


@torch.no_grad()
def largest_by_decade(name: str, kind: str, tokens: int, piece: int = PIECE) -> list[tuple[float, float]]:
    """For each decade of tokens, 1 to 10, 10 to 100, ...: the largest |state| at the end of a piece, and |output|."""
    recurrence, generator = RECURRENCES[name], torch.Generator().manual_seed(1)
    advance, state, done = recurrence.build(torch.float32), None, 0
    found: list[tuple[float, float]] = []
    for length in piece_lengths(tokens, piece):
        y, state = advance(INPUTS[kind](length, recurrence.inputs, generator), state)
        done += length
        decade = len(str(done - 1)) - 1
        found += [(0.0, 0.0)] * (decade + 1 - len(found))
        sizes = (float(state.abs().amax()), float(y.abs().amax()))
        if not all(map(math.isfinite, sizes)):
            return [*found[:decade], (math.inf, math.inf)]
        found[decade] = tuple(map(max, zip(found[decade], sizes)))  # type: ignore[assignment]
    return found


def growth_fault(found: list[tuple[float, float]], memory: float) -> str | None:
    """What is wrong with the sizes of `largest_by_decade`, if anything.

    A sum without decay grows in ten times as many tokens by 10, or, of noise, by its root. A stable recurrence may
    grow only for as long as it remembers; beyond, the largest of ten times as many values is hardly larger.
    """
    if not all(math.isfinite(size) for sizes in found for size in sizes):
        return "not finite"
    if not 0 < memory < math.inf:
        return "an eigenvalue is not inside the unit circle"
    before, last = found[-2][0], found[-1][0]
    if memory < 10 ** (len(found) - 2) and last > MOST_GROWTH * before:
        return f"grew from {before:.3g} to {last:.3g} in the last decade"
    return None


@torch.no_grad()
def drift(name: str, kind: str, at: list[int], piece: int = PIECE) -> list[float]:
    """max |float32 state - float64 state| / max |float64 state| after so many tokens of the same input."""
    recurrence, generator = RECURRENCES[name], torch.Generator().manual_seed(1)
    narrow, wide = recurrence.build(torch.float32), recurrence.build(torch.float64)
    state, exact, done, errors = None, None, 0, []
    while done < max(at):
        u = INPUTS[kind](piece, recurrence.inputs, generator)
        _, state = narrow(u, state)
        _, exact = wide(u.double(), exact)
        done += piece
        if done in at:
            errors.append(float((state.double() - exact).abs().amax() / exact.abs().amax()))
    return errors


@torch.no_grad()
def decoding_drift(name: str, kind: str, tokens: int) -> float:
    """As `drift` at the last token, of a float32 state that went token by token."""
    recurrence, generator = RECURRENCES[name], torch.Generator().manual_seed(1)
    step, wide = recurrence.build(torch.float32), recurrence.build(torch.float64)
    state, exact = None, None
    for length in [PIECE] * (tokens // PIECE):
        u = INPUTS[kind](length, recurrence.inputs, generator)
        for u_t in u.unbind(1):
            _, state = step(u_t.unsqueeze(1), state)
        _, exact = wide(u.double(), exact)
    assert state is not None and exact is not None
    return float((state.double() - exact).abs().amax() / exact.abs().amax())
