"""`generate` from embeddings instead of tokens."""

import pytest
import torch
from transformers import DynamicCache

from tests.tiny_models import EVERY, VARIANTS, language_model

IDS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
USES = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "padded": {"attention_mask": MASK},
    "beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static"},
    "several": {"do_sample": True, "top_k": 3, "num_return_sequences": 2},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
}
CAUSAL = [*VARIANTS, "spade adaptive", "spade lstm", "longhorn untied"]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("variant", CAUSAL)
def test_text_from_embeddings_is_that_from_tokens(variant, use):
    assert EVERY[variant][0] != "spade_seq2seq"
    model, options = language_model(variant), GREEDY | USES[use]
    texts = []
    for given in ({"inputs": IDS}, {"inputs_embeds": model.get_input_embeddings()(IDS)}):
        torch.manual_seed(0)
        output = model.generate(**given, **options)
        texts.append(output if isinstance(output, torch.Tensor) else output.sequences)
    assert torch.equal(texts[1], texts[0][:, IDS.shape[1] :])


@pytest.mark.parametrize("variant", CAUSAL)
def test_both_are_tokens_after_embeddings(variant):
    """With token ids beside, the text begins with them."""
    model = language_model(variant)
    embeddings, cache = model.get_input_embeddings()(IDS), DynamicCache(config=model.config)
    text = model.generate(IDS, inputs_embeds=embeddings, cache=cache, **GREEDY)
    assert torch.equal(text, model.generate(IDS, **GREEDY))
    assert cache.get_seq_length() == text.shape[1] - 1
