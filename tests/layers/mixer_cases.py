"""Every long-range mixer with small options, and what its tests build, draw and compare."""

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.registry import MIXERS, build_mixer
from tests.layers.shown_mixer import LeakyAverage
from tests.row_options import mix

D = 6
CASES: dict[str, tuple[str, dict]] = {
    "s4": ("s4", {"state_size": 8, "block_size": 8}),
    "s4-frozen": ("s4", {"state_size": 8, "block_size": 8, "trainable": "none"}),
    "s4-output": ("s4", {"state_size": 8, "block_size": 8, "trainable": "output"}),
    "s4-tied-filters": ("s4", {"state_size": 4, "block_size": 4, "num_dynamics": 3, "num_filters": 2}),
    "s4d-legs-zoh": ("s4d", {"state_size": 8, "block_size": 8}),
    "s4d-lin-bilinear": ("s4d", {"state_size": 8, "block_size": 16, "init": "lin", "discretization": "bilinear"}),
    "s4d-inv-zoh": ("s4d", {"state_size": 8, "block_size": 8, "init": "inv"}),
    "s4d-filters": ("s4d", {"state_size": 4, "block_size": 4, "num_filters": 3, "num_dynamics": 1}),
    "s4d-frozen": ("s4d", {"state_size": 8, "block_size": 8, "trainable": "none"}),
    "s5": ("s5", {"state_size": 12, "blocks": 3}),
    "s5-filters": ("s5", {"state_size": 8, "blocks": 1, "num_filters": 2}),
    "hyena": ("hyena", {"filter_length": 11, "filter_emb": 5, "filter_hidden_size": 8}),
    "hyena-frozen": ("hyena", {"filter_length": 50, "filter_emb": 5, "filter_hidden_size": 8, "trainable": "none"}),
    "unstructured": ("unstructured", {"filter_length": 23, "filter_emb": 5, "filter_hidden_size": 8}),
    "unstructured-filters": (
        "unstructured",
        {"filter_length": 64, "filter_emb": 5, "filter_hidden_size": 8, "num_filters": 2},
    ),
    "ema": ("ema", {"state_size": 4, "block_size": 8}),
    "ema-frozen": ("ema", {"state_size": 4, "block_size": 8, "trainable": "none"}),
    "lstm": ("lstm", {}),
    "lstm-frozen": ("lstm", {"trainable": "none"}),
    "shown": ("leaky_average", {}),  # the example of docs/extending.md; it looks back only
    "shown-frozen": ("leaky_average", {"trainable": "none"}),
}
CLASSES = MIXERS | {"leaky_average": LeakyAverage}
BOTH_SIDES = [case for case, (name, _) in CASES.items() if CLASSES[name].supports_bidirectional]
# those that can be asked for the outputs at some tokens only, as BST does
SELECTIVE = [case for case, (name, _) in CASES.items() if CLASSES[name].supports_filters]
FROZEN = [case for case in CASES if case.endswith("-frozen")]
L = 29
DOCUMENTS = torch.tensor([[0] * 1 + [1] * 10 + [2] * 18, [0] * 29, [5] * 8 + [6] * 20 + [9] * 1])
every_case = pytest.mark.parametrize("case", CASES)


def sides(cases):
    """Each case looking back, and looking both ways where it can."""
    pairs = [(case, two_sided) for case in cases for two_sided in (False, True) if case in BOTH_SIDES or not two_sided]
    names = [f"{case}-{'two-sided' if two_sided else 'causal'}" for case, two_sided in pairs]
    return pytest.mark.parametrize(("case", "bidirectional"), pairs, ids=names)


every_side = sides(CASES)


@pytest.fixture(autouse=True)
def shown_mixer_has_a_name(monkeypatch):
    monkeypatch.setitem(MIXERS, "leaky_average", LeakyAverage)


def build(case: str, bidirectional: bool = False, dtype: torch.dtype | None = torch.float64, **more) -> Mixer:
    torch.manual_seed(3)
    name, options = CASES[case]
    return build_mixer(name, D, bidirectional=bidirectional, dtype=dtype, **options, **more)


def tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def parts(state) -> tuple[torch.Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def of_rows(state, rows):
    taken = tuple(part[rows] for part in parts(state))
    return taken if isinstance(state, tuple) else taken[0]


def assert_states(actual, wanted, **tolerances):
    tolerances = tolerances or {"atol": 1e-11, "rtol": 1e-9}
    assert len(parts(actual)) == len(parts(wanted))
    for a, b in zip(parts(actual), parts(wanted)):
        torch.testing.assert_close(a, b, **tolerances)


def assert_near(actual, wanted):
    torch.testing.assert_close(actual, wanted, atol=1e-11, rtol=1e-9)


def nonzero_state(mixer: Mixer, batch: int):
    """A state that means something: what some tokens leave behind."""
    return mix(mixer, tokens(batch, 13, D, seed=7), return_final_state=True)[1]
