"""State-space mixers of bfloat16 models are as exact as bfloat16 inputs and outputs allow: states stay in float32."""

import copy

import pytest
import torch

from hf_hybrid_ssm.layers.mixers.base import Mixer
from hf_hybrid_ssm.layers.mixers.registry import build_mixer

L, D = 700, 16
# of the largest entry: one rounding to bfloat16, or a few (states and products of S5, the activation of EMA)
BOUNDS = {"s4d": 4e-3, "s4": 4e-3, "ema": 8e-3, "s5": 8e-3}
MODES = ("plain", "packed", "state")


def measured(mixer: Mixer, dtype: torch.dtype, mode: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    u, weights = (torch.randn(2, L, D, generator=generator).bfloat16() for _ in range(2))
    u = u.to(dtype).requires_grad_()
    options = {"seq_idx": (torch.arange(L) // 300).expand(2, -1)} if mode == "packed" else {}
    y, state = mixer(u, return_final_state=mode == "state", **options)
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
