"""Reading 100,000 tokens: the cache keeps its size, nothing drifts or overflows, and the end is what it should be."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tests.tiny_models import TOKENS

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, **TOKENS}
FAMILIES = {
    "longhorn": {"state_size": 4},
    "spade": {"num_attention_heads": 2, "intermediate_size": 16, "sliding_window": 32},
    "bst": {
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "sliding_window": 32,
        "filter_length": 64,
    },
    "lmu_isa": {"lmu_order": 12, "lmu_theta": 24.0, "post_intermediate_size": 16, "num_attention_heads": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hundred_thousand_tokens(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family])).eval()
    ids = torch.randint(3, TOKENS["vocab_size"], (1, 100_000))
    cache, sizes = DynamicCache(config=model.config), set()
    with torch.inference_mode():
        for piece in ids.split(5000, 1):
            logits = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            assert logits.isfinite().all()
            states = [state for layer in cache.layers for state in layer.states.values()]
            sizes.add(sum(state.untyped_storage().nbytes() for state in states))
            assert all(state.isfinite().all() for state in states if state.is_floating_point())
        # what lies 20,000 tokens back has no weight left in such small models
        recent = model(ids[:, -20_000:], use_cache=False, logits_to_keep=1).logits
    assert len(sizes) == 1
    torch.testing.assert_close(logits, recent, rtol=1e-4, atol=1e-4)
