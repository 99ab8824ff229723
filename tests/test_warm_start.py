"""Embeddings of other models arrive bit for bit, tied outputs with them."""

import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, T5Config
from transformers import T5ForConditionalGeneration as T5

from hf_hybrid_ssm.training.warm_start import copy_embeddings
from tests.damaged_weights import damage, lacking
from tests.tiny_models import BST, LMU, LONGHORN, SPADE

FAMILIES = {"longhorn": LONGHORN, "bst": BST, "lmu_isa": LMU, "spade": SPADE}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=24, n_layer=1, n_head=2, n_positions=16))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return model, folder


def new(model_type, **fields):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **fields}))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gpt2(gpt2, model_type):
    model = new(model_type, vocab_size=64, tie_word_embeddings=True)
    before = model.get_input_embeddings().weight.clone()
    assert copy_embeddings(model, gpt2[1]) == 50
    weight = model.get_input_embeddings().weight
    assert torch.equal(weight[:50], gpt2[0].transformer.wte.weight) and torch.equal(weight[50:], before[50:])
    assert model.get_output_embeddings().weight is weight and weight.requires_grad


def test_t5():
    source = T5(T5Config(vocab_size=40, d_model=24, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    config = AutoConfig.for_model("spade_seq2seq", **{**SPADE, "vocab_size": 40, "num_decoder_layers": 1})
    model = AutoModelForSeq2SeqLM.from_config(config)
    assert copy_embeddings(model, source) == 40
    assert torch.equal(model.get_input_embeddings().weight, source.shared.weight)


def test_what_does_not_fit_is_refused(gpt2):
    for fields in ({"vocab_size": 49}, {"vocab_size": 64, "hidden_size": 16, "state_size": 4}):
        model = new("longhorn", **fields)
        before = model.get_input_embeddings().weight.clone()
        with pytest.raises(ValueError, match=r"needs hidden_size=24 and vocab_size >= 50"):
            copy_embeddings(model, gpt2[0])
        assert torch.equal(model.get_input_embeddings().weight, before)
    with pytest.raises(ValueError, match=r"model \(AdaptiveEmbedding\) has no single table"):
        copy_embeddings(new("spade", vocab_size=64, adaptive_cutoffs=[20, 40], adaptive_factor=2), gpt2[0])


def test_a_checkpoint_without_embeddings_is_refused(gpt2, tmp_path):
    folder = shutil.copytree(gpt2[1], tmp_path / "gpt2")
    damage(folder, lacking, "transformer.wte.weight")
    with pytest.raises(ValueError, match=r"gpt2' lacks wte\.weight, its token embeddings"):
        copy_embeddings(new("longhorn", vocab_size=64), folder)
