"""A model whose weights are not all in its files, or not all of its files', is refused by the name of a tensor."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_hybrid_ssm.hub.whole_models import load_whole
from tests.damaged_weights import DAMAGES, damage
from tests.tiny_models import FEW, build


def llama():
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


def built(variant):
    torch.manual_seed(0)
    return llama() if variant == "llama" else build(variant)


@pytest.mark.parametrize("variant", ["llama", *FEW])
def test_a_whole_model_is_loaded(variant, tmp_path):
    model = built(variant)
    model.save_pretrained(tmp_path)
    found = load_whole(type(model), tmp_path)
    torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=0, atol=0)
    given = load_whole(type(model), None, config=model.config, state_dict=model.state_dict())
    torch.testing.assert_close(given.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("how", DAMAGES, ids=lambda how: how.__name__)
@pytest.mark.parametrize("variant", ["llama", *FEW])
def test_any_other_is_refused_by_name(variant, how, tmp_path, caplog):
    model = built(variant)
    model.save_pretrained(tmp_path)
    name = next(name for name, _ in model.named_parameters() if ".layers.1." in name)
    message = damage(tmp_path, how, name)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_whole(type(model), tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    assert "LOAD REPORT" not in caplog.text


def test_the_report_of_other_models_is_left_to_transformers(tmp_path, caplog):
    model = llama()
    model.save_pretrained(tmp_path)
    name = damage(tmp_path, next(iter(DAMAGES)), "model.norm.weight").split()[1].strip(",")
    with pytest.raises(ValueError, match=re.escape(name)):
        load_whole(AutoModelForCausalLM, tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "LOAD REPORT" in caplog.text
