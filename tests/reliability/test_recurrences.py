"""Every recurrence of the package alone, over very many tokens: how large its state gets, and how far it drifts."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.ema import EMA
from hf_hybrid_ssm.layers.mixers.s4 import S4
from hf_hybrid_ssm.layers.mixers.s4d import S4D
from hf_hybrid_ssm.layers.mixers.s5 import S5
from hf_hybrid_ssm.ops.legendre_memory import transition
from tests.reporting import THOROUGH
from tests.row_options import legendre_memory, longhorn_scan, mix, one_token

CHANNELS, STATES, PIECE = 4, 8, 1000
DECADES = [1] * 10 + [10] * 9 + [100] * 9  # how the first piece is cut: each decade of tokens is looked at
MOST_GROWTH = 2.0
# float32 constants forget at a slightly wrong rate, the more so the longer a recurrence remembers
DRIFT_BOUND = 1e-3
# (input, state before) → (outputs of all tokens, state after)
Piece = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class Recurrence(NamedTuple):
    """A recurrence in pieces of tokens.

    Attributes:
        inputs: channels of the input it takes.
        build: dtype → the function that advances it by a piece; the same parameters in each dtype.
        memory: tokens after which it has forgotten all but 1 / e, 1 / (1 - |largest eigenvalue|).
    """

    inputs: int
    build: Callable[[torch.dtype], Piece]
    memory: Callable[[], float]


def _mixer(make: Callable[[], Mixer], **shifts: float) -> Recurrence:
    """A mixer, some of whose parameters training has moved a long way."""

    def seeded() -> Mixer:
        torch.manual_seed(0)
        mixer = make().requires_grad_(False)
        for name, shift in shifts.items():
            mixer.get_parameter(name).add_(shift)
        return mixer

    def build(dtype: torch.dtype) -> Piece:
        mixer = seeded().to(dtype)

        def advance(u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            if u.shape[1] == 1 and state is not None:  # as in decoding
                return one_token(mixer, u[:, 0], state)  # type: ignore[return-value]
            return mix(mixer, u, initial_state=state, return_final_state=True)

        return advance

    return Recurrence(CHANNELS, build, lambda: 1 / (1 - _largest_eigenvalue(seeded())))


@torch.no_grad()
def _largest_eigenvalue(mixer: Mixer) -> float:
    """Of one step, in float64."""
    if isinstance(mixer, S5):
        values = mixer._discretised(torch.float64)[0]
    else:
        step = mixer.dynamics(torch.float64)[0]  # type: ignore[operator]
        values = step.value
        if step.form != "real":
            values = torch.linalg.eigvals(values) if step.form == "dense" else torch.view_as_complex(values)
    return float(values.abs().max())


def _longhorn(key_size: float) -> Recurrence:
    """Values, step sizes, keys and queries are all input, as in a block.

    h_t = (1 - w) h_{t-1} + w x_t / k_t with w = Δ_t k_t²: the state stays between what it was and x_t / k_t.
    """

    def build(dtype: torch.dtype) -> Piece:
        def advance(u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            x, dt, k, q = (part.contiguous() for part in u.split([CHANNELS, CHANNELS, STATES, STATES], dim=-1))
            y, final = longhorn_scan(x, dt, key_size * k, q, initial_state=state, return_final_state=True)
            return y, final  # type: ignore[return-value]

        return advance

    square = key_size**2
    return Recurrence(2 * CHANNELS + 2 * STATES, build, lambda: (1 + 0.5 * STATES * square) / (0.5 * square))


def _legendre_memory(order: int, theta: float) -> Recurrence:
    def build(dtype: torch.dtype) -> Piece:
        def advance(u: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            options = {"initial_state": state, "return_final_state": True}
            return legendre_memory(u, order=order, theta=theta, **options)  # type: ignore[return-value]

        return advance

    largest = torch.linalg.eigvals(transition(order, theta)).abs().max()
    return Recurrence(CHANNELS, build, lambda: 1 / (1 - float(largest)))


RECURRENCES = {
    "Longhorn": _longhorn(1.0),
    "Longhorn, keys of 0.01": _longhorn(0.01),
    "Longhorn, keys of 100": _longhorn(100.0),
    "S4": _mixer(lambda: S4(CHANNELS, state_size=STATES)),
    "S4, steps 20 times as long": _mixer(lambda: S4(CHANNELS, state_size=STATES), log_dt=3.0),
    "S4, 50 times less decay": _mixer(lambda: S4(CHANNELS, state_size=STATES), A_log_real=-3.9),
    "S4D, zero-order hold": _mixer(lambda: S4D(CHANNELS, state_size=STATES)),
    "S4D, bilinear": _mixer(lambda: S4D(CHANNELS, state_size=STATES, discretization="bilinear")),
    "S4D, 50 times less decay": _mixer(lambda: S4D(CHANNELS, state_size=STATES), A_log_real=-3.9),
    "S5": _mixer(lambda: S5(CHANNELS, state_size=STATES, blocks=2)),
    "S5, eigenvalues pushed over the axis": _mixer(lambda: S5(CHANNELS, state_size=STATES, blocks=2), A_real=2.0),
    "LMU, window of 350": _legendre_memory(STATES, 350.0),
    "LMU, order 64": _legendre_memory(64, 350.0),
    "EMA": _mixer(lambda: EMA(CHANNELS, state_size=STATES)),
    "EMA, almost no damping": _mixer(lambda: EMA(CHANNELS, state_size=STATES), alpha=-7.0),
}
CLOSE = dict.fromkeys(("Longhorn", "S4", "S4D, 50 times less decay", "S5", "EMA", "LMU, window of 350"), 1e-5) | {
    "S5, eigenvalues pushed over the axis": 1e-4
}


@torch.no_grad()
def states(name: str, kind: str, tokens: int, dtype=torch.float32, by: int | None = None) -> Iterator[tuple]:
    """(tokens so far, outputs, state) after every piece, or every `by` tokens: the same input in every dtype."""
    recurrence, generator = RECURRENCES[name], torch.Generator().manual_seed(1)
    advance, state, done = recurrence.build(dtype), None, 0
    while done < tokens:
        shape = (1, PIECE, recurrence.inputs)
        u = torch.ones(shape) if kind == "ones" else torch.randn(shape, generator=generator)
        for piece in u.to(dtype).split(by or (PIECE if done else DECADES), 1):
            y, state = advance(piece, state)
            done += piece.shape[1]
            yield done, y, state


def largest_by_decade(name: str, kind: str, tokens: int) -> list[float]:
    """For each decade of tokens, 1 to 10, 10 to 100, ...: the largest |state| at the end of a piece."""
    found: list[float] = []
    for done, y, state in states(name, kind, tokens):
        if not bool(y.isfinite().all() and state.isfinite().all()):
            return [*found, math.inf]
        decade = len(str(done - 1)) - 1
        found += [0.0] * (decade + 1 - len(found))
        found[decade] = max(found[decade], float(state.abs().amax()))
    return found


def growth_fault(found: list[float], memory: float) -> str | None:
    """What is wrong with the sizes of `largest_by_decade`, if anything.

    A sum without decay grows in ten times as many tokens by 10, or, of noise, by its root. A stable recurrence may
    grow only for as long as it remembers; beyond, the largest of ten times as many values is hardly larger.
    """
    if not all(map(math.isfinite, found)):
        return "not finite"
    if not 0 < memory < math.inf:
        return "an eigenvalue is not inside the unit circle"
    if memory < 10 ** (len(found) - 2) and found[-1] > MOST_GROWTH * found[-2]:
        return f"grew from {found[-2]:.3g} to {found[-1]:.3g} in the last decade"
    return None


def drift(name: str, kind: str, at: list[int], by: int | None = None) -> list[float]:
    """max |float32 state - float64 state| / max |float64 state| after so many tokens of the same input."""
    runs = (states(name, kind, max(at), torch.float32, by), states(name, kind, max(at), torch.float64))
    narrow, wide = ({done: state for done, _, state in run if done in at} for run in runs)
    return [float((narrow[n].double() - wide[n]).abs().amax() / wide[n].abs().amax()) for n in at]


@pytest.mark.parametrize("kind", ["noise", "ones"] if THOROUGH else ["noise"])
@pytest.mark.parametrize("name", [name for name in RECURRENCES if THOROUGH or "order 64" not in name])
def test_states_are_bounded(name, kind, record_property):
    """Each recurrence alone, in float32, in pieces: the largest |state| in the last two decades of tokens.

    *Memory* is 1 / (1 - |largest eigenvalue|) tokens (for Longhorn, by its mean step); only for as long may a state
    still grow. Some have parameters that training would have to push far.
    """
    found = largest_by_decade(name, kind, 1_000_000 if THOROUGH else 10_000)
    memory = RECURRENCES[name].memory()
    record_property("memory", f"{memory:,.0f}")
    for decade, size in list(enumerate(found, 1))[-2:]:
        record_property(f"to 1e{decade}", f"{size:.3g}")
    assert growth_fault(found, memory) is None and len(found) == (6 if THOROUGH else 4)


@pytest.mark.parametrize("kind", ["noise", "ones"])
@pytest.mark.parametrize("name", RECURRENCES if THOROUGH else CLOSE)
def test_drift_of_the_float32_state(name, kind, record_property):
    """Largest difference from the float64 state, over the largest |float64 state|, in pieces and by single steps.

    In pieces, powers of a decay are taken in float64 and rounded once for a block, where steps round at each token.
    16,000 tokens are a second of audio.
    """
    at = [1000, 16_000, 100_000] if THOROUGH else [1000, 16_000]
    errors, by_steps = drift(name, kind, at), drift(name, kind, [2000], by=1)
    for tokens, error in zip([*map("{:,}".format, at), "2,000 by steps"], errors + by_steps):
        record_property(tokens, f"{error:.1e}")
    assert max(errors + by_steps) < DRIFT_BOUND
    assert max(errors[:2] + by_steps) < CLOSE.get(name, DRIFT_BOUND)
