"""An adaptive vocabulary under adapters and other sizes: the head reads whatever embedding the model has."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.memory import in_own_memory
from tests.tiny_models import TOKENS, config_of, own_language_model

IDS = torch.randint(3, TOKENS["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(0))
BANDS = [20, 40, TOKENS["vocab_size"]]


@pytest.fixture
def model():
    return own_language_model("spade adaptive")


@torch.no_grad()
def logits_of(model, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model.eval()(input_ids=ids).logits


def test_a_trained_copy_of_the_embedding_is_read_by_the_head_too(model, tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    base, before = copy.deepcopy(model), logits_of(model)
    tuned = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-2)
    for _ in range(3):
        tuned(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits_of(tuned)
    assert not torch.allclose(trained, before, atol=0.1)
    tuned.save_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(base, tmp_path / "adapter")), trained)
    merged = tuned.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = in_own_memory(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(logits_of(again), trained, rtol=1e-4, atol=1e-4)


def test_another_embedding_is_read_by_the_head(model):
    other = copy.deepcopy(model.get_input_embeddings())
    with torch.no_grad():
        other.tables[1].mul_(2)
    before = logits_of(model, IDS % 20)  # of the first band alone, so that only the head sees the change
    model.set_input_embeddings(other)
    after = logits_of(model, IDS % 20)
    assert not torch.allclose(after[..., 20:40], before[..., 20:40], atol=1e-2)
    assert torch.equal(copy.deepcopy(model)(IDS).logits, logits_of(model))


@pytest.mark.parametrize("mean_resizing", [True, False])
def test_new_tokens_join_the_last_band(model, mean_resizing, tmp_path):
    before = logits_of(model)
    resized = model.resize_token_embeddings(70, mean_resizing=mean_resizing)
    assert resized is model.get_input_embeddings() and resized.bands == [20, 40, 70]
    assert model.config.vocab_size == 70 == model.model.config.vocab_size
    logits = logits_of(model)
    assert logits.shape == (2, 9, 70)
    torch.testing.assert_close(logits.logsumexp(-1), torch.zeros(2, 9), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[..., :40], before[..., :40])  # the bands before do not hear of it
    ids = IDS.clone()
    ids[0, 3] = 69
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert resized.tables[-1].grad[-1].abs().sum() > 0
    model.save_pretrained(tmp_path)
    assert torch.equal(
        logits_of(in_own_memory(AutoModelForCausalLM.from_pretrained(tmp_path)), ids), logits_of(model, ids)
    )
    model.resize_token_embeddings(TOKENS["vocab_size"])
    assert torch.equal(logits_of(model), before)


def test_sizes_of_a_vocabulary(model):
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    model.resize_token_embeddings(pad_to_multiple_of=16)
    assert model.config.vocab_size == 64 and logits_of(model).shape[-1] == 64
    for size in (40, 7):
        with pytest.raises(
            ValueError, match=rf"new_num_tokens={size} leaves nothing of the last band .* begins at 40"
        ):
            model.resize_token_embeddings(size)
    plain = AutoModelForSequenceClassification.from_config(config_of("spade s4 window"))
    assert plain.resize_token_embeddings(70).weight.shape[0] == 70


def test_single_tokens_cannot_be_trained_alone(model):
    lora = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5, 50], task_type="CAUSAL_LM")
    with pytest.raises(AttributeError, match=r"a table for each band .* train it whole with modules_to_save"):
        get_peft_model(model, lora)
    assert not hasattr(model.get_input_embeddings(), "weight")
