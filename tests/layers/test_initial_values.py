"""The initial weights have the variances that the papers name."""

import pytest
import torch
from torch import nn

from hf_hybrid_ssm import BstConfig, BstForCausalLM
from hf_hybrid_ssm.layers.mixers.registry import build_mixer
from hf_hybrid_ssm.models.bst.context_states import HeadwiseLinear


@pytest.mark.parametrize("variant", ["mh", "mf"])
def test_bst_maps_have_variance_one_over_fan_in(variant):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 64}
    model = BstForCausalLM(BstConfig(**sizes, num_hidden_layers=2, ssm_layers=[1], context_variant=variant))
    maps = [module for module in model.model.modules() if isinstance(module, (nn.Linear, HeadwiseLinear))]
    assert any(isinstance(module, HeadwiseLinear) for module in maps) == (variant == "mh")
    for module in maps:
        weight = module.weight.double()
        assert float(weight.var(correction=0)) * module.in_features == pytest.approx(1, rel=0.08)
        bound = 2 / 0.8796 / module.in_features**0.5
        assert 0.9 * bound < float(weight.abs().max()) <= 1.001 * bound


def test_s5_outputs_have_variance_one_over_state_size():
    torch.manual_seed(0)
    mixer = build_mixer("s5", 256, state_size=64, blocks=1)
    # real and imaginary part of each entry have it, and the basis is unitary
    assert float(mixer.C.square().sum(-1).mean()) * 64 / 2 == pytest.approx(1, rel=0.05)
