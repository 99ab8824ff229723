"""Numbers stay finite and close: long recurrences, extreme inputs, low precision, great depth, a bad batch."""

import math

import pytest
import torch

from hf_hybrid_ssm.ops.linear_scan import diagonal_scan
from tests.reliability.extremes import (
    CHOOSES,
    ERROR_BOUNDS,
    EXTREME_INPUTS,
    Spike,
    deep,
    forward_error,
    gradient_sizes,
    in_dtype,
    not_finite,
    spike,
    spread_over_layers,
    without_gradient,
)
from tests.reliability.recurrences import (
    INPUTS,
    RECURRENCES,
    Recurrence,
    decoding_drift,
    drift,
    growth_fault,
    largest_by_decade,
    piece_lengths,
)
from tests.reporting import THOROUGH
from tests.tiny_models import COMBINATIONS, EVERY, FEW, build, class_with_loss

TOKENS = 1_000_000 if THOROUGH else 10_000
# float32 constants forget at a slightly wrong rate, the more so the longer a recurrence remembers
DRIFT_BOUND = 1e-3
SPREAD_BOUND = 1e3
VARIANTS = list(EVERY) if THOROUGH else FEW
KINDS = list(INPUTS) if THOROUGH else ["noise"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in RECURRENCES if THOROUGH or "order 64" not in name])
def test_states_are_bounded(name, kind, record_property):
    """Each recurrence alone, in float32, in pieces: the largest |state| in each decade of tokens.

    *Memory* is 1 / (1 - |largest eigenvalue|) tokens (for Longhorn, by its mean step); only for as long may a state
    still grow. Some have parameters that training would have to push far.
    """
    found, memory = largest_by_decade(name, kind, TOKENS), RECURRENCES[name].memory()
    record_property("memory", f"{memory:,.0f}")
    for decade, (state, _) in enumerate(found, 1):
        record_property(f"to 1e{decade}", f"{state:.3g}")
    assert growth_fault(found, memory) is None


def _sum_with_decay(decay: float) -> Recurrence:
    def advance(u, state):
        h, state = diagonal_scan(
            torch.full((4,), decay, dtype=u.dtype), u, initial_state=state, return_final_state=True
        )
        return h, state

    return Recurrence(4, lambda dtype: advance, lambda: 1 / (1 - decay) if decay != 1 else math.inf)


@pytest.mark.parametrize(
    ("decay", "kind", "message"),
    [(1.0, "noise", "unit circle"), (1.01, "noise", "not finite"), (1.0001, "ones", "unit circle")],
)
def test_a_state_without_bound_is_found(monkeypatch, decay, kind, message):
    monkeypatch.setitem(RECURRENCES, "sum", _sum_with_decay(decay))
    assert message in growth_fault(largest_by_decade("sum", kind, 10_000), RECURRENCES["sum"].memory())
    # whatever its eigenvalues seem to be
    found = largest_by_decade("sum", "ones", 10_000)
    assert growth_fault(found, memory=10.0) is not None
    assert growth_fault([(1.0, 1.0)] * 4, memory=10.0) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECURRENCES if THOROUGH else ["Longhorn"])
def test_drift_of_the_float32_state(name, kind, record_property):
    """Largest difference from the float64 state, over the largest |float64 state|, in pieces and by single steps.

    In pieces, powers of a decay are taken in float64 and rounded once for a block, where steps round at each token.
    """
    at = [1000, 10_000, 100_000] if THOROUGH else [1000]
    errors = [*drift(name, kind, at), decoding_drift(name, kind, 10_000 if THOROUGH else 1000)]
    for place, error in zip([f"{tokens:,}" for tokens in at] + ["by steps"], errors):
        record_property(place, f"{error:.1e}")
    assert max(errors) < DRIFT_BOUND


def test_every_decade_is_looked_at():
    lengths = list(piece_lengths(5000, piece=1000))
    assert sum(lengths) == 5000 and lengths[:11] == [1] * 10 + [10] and max(lengths) == 1000
    assert len(largest_by_decade("EMA", "noise", 5000)) == 4


@pytest.mark.parametrize("name", ["Longhorn", "S4", "S4D, 50 times less decay", "S5", "EMA", "LMU, window of 350"])
def test_float32_states_stay_with_float64(name):
    """A second of audio: 16,000 tokens."""
    assert drift(name, "noise", [16_000])[0] < 1e-5
    assert drift(name, "ones", [16_000])[0] < 1e-5


@pytest.mark.parametrize("name", ["S4", "S4D, 50 times less decay", "S5"])
def test_decoding_stays_with_float64(name):
    assert decoding_drift(name, "ones", 2000) < 1e-5


def test_s5_remembers_for_as_long_as_its_parameters_say():
    """An eigenvalue rounded to float32 would forget at another rate: 0.999992 ** 100,000 is off by a few percent.

    (In the reference each token rounds the state, in blocks one in 32.)
    """
    name = "S5, eigenvalues pushed over the axis"
    assert drift(name, "ones", [20_000])[0] < 1e-4
    decay = torch.tensor([0.9999999], dtype=torch.float64)
    start = torch.ones(1, 1)
    for backend in ("torch", "reference"):
        _, state = diagonal_scan(
            decay, torch.zeros(1, 4096, 1), initial_state=start, return_final_state=True, backend=backend
        )
        assert state.dtype == torch.float32
        assert abs(float(state) - 0.9999999**4096) < (1e-5 if backend == "torch" else 3e-4)
    with pytest.raises(TypeError, match="decay"):
        diagonal_scan(decay.to(torch.float32), torch.zeros(1, 2, 1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", ERROR_BOUNDS if THOROUGH else [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("variant", "name"), COMBINATIONS if THOROUGH else [(v, class_with_loss(v)) for v in FEW])
def test_extreme_inputs_give_finite_numbers(variant, name, dtype):
    model = in_dtype(build(variant, name), dtype)
    assert [(kind, fault) for kind in EXTREME_INPUTS for fault in not_finite(model, kind)] == []


def test_what_is_not_finite_is_found():
    model = build("longhorn")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.inf
    assert not_finite(model, "one token") == ["output"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_costs_few_digits(variant, record_property):
    """Largest difference from the float64 model's output, over its largest value.

    "bst with memory" has no bound: which old states it retrieves is a choice, and a rounding can make another one.
    """
    errors = {dtype: forward_error(variant, class_with_loss(variant), dtype) for dtype in ERROR_BOUNDS}
    for dtype, error in errors.items():
        record_property(str(dtype), f"{error:.1e}")
        assert torch.finfo(dtype).eps / 100 < error
        assert error < ERROR_BOUNDS[dtype] or variant == CHOOSES


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_pass_48_layers(variant, record_property):
    """Finite and not zero at initialisation; *spread* is the largest layer's gradient over the smallest's."""
    sizes = gradient_sizes(deep(variant, 48))
    record_property("spread", f"{spread_over_layers(sizes):.1f}")
    assert without_gradient(sizes) == []
    assert spread_over_layers(sizes) < SPREAD_BOUND


def test_a_dead_layer_is_found():
    model = deep("longhorn", 3)
    torch.nn.init.zeros_(model.model.layers[1].mixer.out_proj.weight)
    dead = without_gradient(gradient_sizes(model))
    assert "model.layers.1.mixer.D" in dead and not any("layers.0" in name or "layers.2" in name for name in dead)
    assert spread_over_layers({"a.layers.0.w": 1.0, "a.layers.1.w": 4.0, "b": 99.0}) == 4


@pytest.mark.parametrize("variant", EVERY if THOROUGH else ["longhorn", "spade s4 trained"])
def test_training_recovers_from_a_bad_batch(variant, record_property):
    """Mean loss of ten steps before, the loss of the batch, and the mean of steps 11 to 20 after it."""
    found = spike(variant, bad_at=60 if THOROUGH else 40)
    for name in ("before", "at", "after"):
        record_property(name, f"{getattr(found, name):.2f}")
    assert found.recovered


def test_what_counts_as_recovered():
    assert Spike(1.0, 5.0, 0.9).recovered
    assert not Spike(1.0, 5.0, 3.0).recovered
    assert not Spike(1.0, 1.1, 0.9).recovered  # nothing happened that it could recover from
    assert not Spike(1.0, math.nan, math.nan).recovered


def test_parameters_pushed_far_are_another_recurrence():
    """`_pushed` reaches the parameters: S5 keeps its eigenvalues left of the axis, others move as they are told."""
    assert RECURRENCES["S5, eigenvalues pushed over the axis"].memory() > 1e5
    assert RECURRENCES["S4D, 50 times less decay"].memory() > 20_000
