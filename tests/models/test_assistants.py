"""Assisted generation by a model that has another tokenizer: the words of the target, whatever is drafted."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_hybrid_ssm.models.cache import has_forgotten, let_assistant_forget
from tests.tiny_models import VARIANTS, language_model

LETTERS = "abcdef"
PAIRS = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]


def tokenizer_of(merges: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<s>", "</s>", *LETTERS, *merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(pair[0], pair[1:]) for pair in merges]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocabulary = 3 + len(LETTERS)
    config = LlamaConfig(vocab_size=vocabulary, pad_token_id=0, eos_token_id=None, initializer_range=1.0, **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_target_with_another_tokenizer(variant, target, monkeypatch):
    """What it corrects is spelled anew, in other tokens of the assistant: further back than the last round."""
    assistant, letters, pairs = language_model(variant), tokenizer_of([]), tokenizer_of(PAIRS)
    assert len(pairs) <= assistant.config.vocab_size
    forgotten, crop = [], DynamicCache.crop

    def seen(cache, tokens_to_remove):
        crop(cache, tokens_to_remove)
        forgotten.append(has_forgotten(cache))

    monkeypatch.setattr(DynamicCache, "crop", seen)
    for text in ("abcafdeb", "ffbadc", "eeacdfbd"):
        ids = letters(text, return_tensors="pt").input_ids
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 14, "do_sample": False}
        wanted = target.generate(ids, **options)
        options |= {"assistant_model": assistant, "tokenizer": letters, "assistant_tokenizer": pairs}
        assert torch.equal(target.generate(ids, **options), wanted)
    assert any(forgotten) and not all(forgotten)


def test_only_an_assistant_forgets():
    """Where nobody reads the text again, going back beyond the record is an error that leaves the cache as it was."""
    model = language_model("longhorn + window and full attention")
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    for is_assistant in (False, True):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(ids[:, :8], past_key_values=cache)
        cache.crop(-1)
        if not is_assistant:
            with pytest.raises(ValueError, match="goes 2 tokens beyond the recorded past"):
                cache.crop(-2)
            assert cache.get_seq_length() == 7 and not has_forgotten(cache)
            continue
        let_assistant_forget(cache)
        cache.crop(-2)
        assert has_forgotten(cache) and cache.get_seq_length() == 0
