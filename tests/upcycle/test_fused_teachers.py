"""A Phi-3 is a Mistral with fused projections: loaded as a teacher it is one, and its students start as it."""

import pytest
import torch
from transformers import MistralForCausalLM, Phi3Config, Phi3ForCausalLM

from hf_hybrid_ssm.upcycle import load_teacher_model, upcycle
from tests.upcycle.test_upcycle import SIZES, tokens

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
FIELDS = [{}, {"sliding_window": 7}, {"tie_word_embeddings": True, "num_key_value_heads": 4}]


def saved(folder, **fields):
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SIZES | {"pad_token_id": 0} | fields)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_phi_3_is_the_same_with_its_projections_split(fields, tmp_path):
    fused = saved(tmp_path, **fields)
    teacher = load_teacher_model(tmp_path)
    assert isinstance(teacher, MistralForCausalLM) and not teacher.training
    ids = tokens()
    torch.testing.assert_close(teacher(ids).logits, fused(ids).logits, rtol=1e-5, atol=1e-5)
    written = teacher.generate(ids[:, :5], do_sample=False, max_new_tokens=8)
    assert written.equal(fused.generate(ids[:, :5], do_sample=False, max_new_tokens=8))
    whole, _ = upcycle(teacher, keep=1.0)
    torch.testing.assert_close(whole(ids).logits, fused(ids).logits, rtol=1e-5, atol=1e-5)
    seen = fields.get("sliding_window", 11)  # the token itself too
    student, report = upcycle(teacher, family="bst", sliding_window=seen - 1)
    torch.testing.assert_close(student(ids[:, :seen]).logits, fused(ids[:, :seen]).logits, rtol=1e-5, atol=1e-5)
    assert "model.layers.0.self_attn.k_proj.weight" in report.copied


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"rope_parameters": LONG, "original_max_position_embeddings": 64}, "rope_type='longrope'"),
        ({"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
    ],
)
def test_a_phi_3_that_is_more_than_that_is_refused(fields, words, tmp_path):
    saved(tmp_path, **fields)
    with pytest.raises(ValueError, match=words):
        load_teacher_model(tmp_path)


def test_refusals_say_what_to_do(tmp_path):
    fused = saved(tmp_path)
    with pytest.raises(ValueError, match=r"load_teacher\(FOLDER\) splits"):
        upcycle(fused, keep=1.0)
    with pytest.raises(ValueError, match="device_map='auto' cannot be used with a phi3"):
        load_teacher_model(tmp_path, device_map="auto")
