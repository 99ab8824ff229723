"""What stands in for newer versions of transformers."""

import pytest
import torch
from transformers import DynamicCache

from hf_hybrid_ssm.models import generation, heads
from hf_hybrid_ssm.models.outputs import CACHE


@pytest.mark.parametrize(
    "keep, shape",
    [
        (0, (2, 5, 3)),
        (2, (2, 2, 3)),
        (torch.tensor([0, 4]), (2, 2, 3)),
        (torch.tensor([[0], [3]]), (2, 1, 3)),
        (torch.tensor([[True] * 5, [False] * 4 + [True]]), (6, 3)),
    ],
)
def test_tokens_whose_logits_are_wanted(keep, shape):
    states = torch.arange(30.0).view(2, 5, 3)
    kept = heads.slice_logits_to_keep(states, keep)
    assert kept.shape == shape and torch.equal(kept.reshape(-1, 3)[-1], states[1, 3 if shape == (2, 1, 3) else 4])


class Generation:
    def _prepare_attention_mask_for_generation(self, inputs, config, model_kwargs):
        return inputs


class Model(generation.HybridGenerationMixin, Generation):
    pass


@pytest.mark.parametrize("positions, mask", [([0, 1, 0], [1, 1, 1]), ([0, 1, 2], [1, 1, 1]), ([0, 0, 1], [0, 1, 1])])
def test_a_mask_that_hides_nothing_gives_way_to_documents(monkeypatch, positions, mask):
    monkeypatch.setattr(generation, "ADDS_FULL_MASKS", True)
    given = {"position_ids": torch.tensor([positions])}
    kept = Model()._prepare_attention_mask_for_generation(torch.tensor([mask]), None, given)
    assert (kept is None) == (positions == [0, 1, 0])


def test_documents_after_a_cache_are_refused(monkeypatch):
    monkeypatch.setattr(generation, "ADDS_FULL_MASKS", True)
    cache = DynamicCache()
    cache.update(*[torch.zeros(1, 1, 3, 2)] * 2, 0)
    given = {"position_ids": torch.tensor([[0, 1, 0]]), CACHE: cache}
    with pytest.raises(ValueError, match=r"transformers>=5\.18"):
        Model()._prepare_attention_mask_for_generation(torch.ones(1, 3), None, given)
