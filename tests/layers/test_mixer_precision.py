"""State-space mixers of bfloat16 models are as exact as bfloat16 inputs and outputs allow: states stay in float32."""

import copy

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from tests.row_options import mix

L, D = 700, 16
# of the largest entry: one rounding to bfloat16, or a few (states and products of S5, the activation of EMA)
BOUNDS = {"s4d": 4e-3, "s4": 4e-3, "ema": 8e-3, "s5": 8e-3}
MODES = ("plain", "packed", "state")


def measured(mixer: Mixer, dtype: torch.dtype, mode: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    u, weights = (torch.randn(2, L, D, generator=generator).bfloat16() for _ in range(2))
    u = u.to(dtype).requires_grad_()
    options = {"seq_idx": (torch.arange(L) // 300).expand(2, -1)} if mode == "packed" else {}
    y, state = mix(mixer, u, return_final_state=mode == "state", **options)
    (y * weights.to(dtype)).sum().backward()
    names = ("C", "gamma", "log_dt", "delta", "B", "beta")
    gradients = {n: p.grad for n, p in mixer.named_parameters() if n in names}
    return {"y": y, "du": u.grad} | ({} if state is None else {"state": state}) | gradients


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BOUNDS)
def test_bfloat16_models(name, mode):
    torch.manual_seed(1)
    mixer = build_mixer(name, D, state_size=16, dtype=torch.bfloat16)
    exact = copy.deepcopy(mixer)
    for key, value in exact.named_parameters():
        exact.register_parameter(key, torch.nn.Parameter(value.detach().double()))
    got, want = measured(mixer, torch.bfloat16, mode), measured(exact, torch.float64, mode)
    for key, wanted in want.items():
        error = (got[key].double() - wanted).abs().max() / wanted.abs().max()
        assert error < BOUNDS[name], f"{key}: {error:.1e}"


FILTER = {"ffn_in", "ffn_in_bias", "ffn", "ffn_bias", "freq", "ffn_out", "D"}
# what makes a recurrence or a filter, none of which a model in bfloat16 may round
KEPT = {
    "s4": {"A_log_real", "A_imag", "B", "P", "C", "log_dt", "D"},
    "s4d": {"A_log_real", "A_imag", "B", "C", "log_dt", "D"},
    "s5": {"A_real", "A_imag", "B", "C", "log_dt", "D"},
    "ema": {"delta", "alpha", "beta", "gamma", "omega"},
    "unstructured": FILTER,
    "hyena": FILTER,
    "lstm": set(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_in_float32(name):
    """By a list of its own: the mixers' could lack one."""
    cast = build_mixer(name, D).to(torch.bfloat16)
    built = build_mixer(name, D, dtype=torch.bfloat16)
    for mixer in (cast, built):
        wide = {key.rpartition(".")[2] for key, value in mixer.named_parameters() if value.dtype == torch.float32}
        assert wide == KEPT[name]
        assert {value.dtype for value in mixer.parameters()} <= {torch.float32, torch.bfloat16}
