"""One token of a program that keeps its states reads a text as a forward does, and another one after it."""

import copy

import pytest
import torch
from transformers import StaticCache

from hf_hybrid_ssm.models.cache import fit_cache
from hf_hybrid_ssm.ops.core.dispatch import backend
from hf_hybrid_ssm.serving.decoding_step import DecodingStep
from hf_hybrid_ssm.students.initial import student_of
from tests.students.teachers import teacher
from tests.tiny_models import EVERY, build, language_model, own_language_model

CAUSAL = [
    variant
    for variant, (model_type, fields) in EVERY.items()
    if model_type != "spade_seq2seq" and not fields.get("bidirectional")
]
ROWS, LENGTH = 2, 30  # longer than windows and blocks


def texts(seed):
    return torch.randint(3, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def read(step, text):
    return torch.cat([step(token, torch.tensor([place])) for place, token in enumerate(text.split(1, 1))], 1)


def check(model, step):
    for seed in (0, 1):
        torch.testing.assert_close(read(step, texts(seed)), model(texts(seed)).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", CAUSAL)
def test_two_texts_token_by_token(variant):
    model = own_language_model(variant)
    with torch.no_grad():
        check(model, DecodingStep(model, ROWS, LENGTH))


def test_a_teacher_with_a_softcap():
    model = student_of(teacher("gemma2"), window=8, keep=[1]).float()
    with torch.no_grad():
        check(model, DecodingStep(model, ROWS, LENGTH))


@pytest.mark.parametrize("variant", ["longhorn", "bst sh s4d", "student: first tokens"])
def test_an_exported_program_keeps_its_states(variant, tmp_path):
    model = own_language_model(variant)
    step = DecodingStep(model, ROWS, LENGTH)
    with torch.no_grad(), backend("torch"):
        torch.export.save(torch.export.export(step, step.example()), tmp_path / "step.pt2")
        check(model, torch.export.load(tmp_path / "step.pt2").module())
        check(model, copy.deepcopy(step))
    with pytest.raises(RuntimeError, match=r"within torch\.no_grad"), backend("torch"):
        torch.export.export(step, step.example())


def test_after_a_token_that_broke_off():
    """The next one is refused, and a first one begins anew."""
    model, text = own_language_model("longhorn"), texts(0)
    step = DecodingStep(model, ROWS)

    def broken(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        read(step, text[:, :5])
        for part in (model.model.layers[1], model.model.layers[1].mixer.out_proj):
            hook = part.register_forward_pre_hook(broken)
            with pytest.raises(KeyboardInterrupt):
                step(text[:, 5:6], torch.tensor([5]))
            hook.remove()
            with pytest.raises(ValueError, match="cache is half advanced"):
                step(text[:, 5:6], torch.tensor([5]))
            torch.testing.assert_close(read(step, text[:, :9]), model(text).logits[:, :9], rtol=0, atol=1e-4)
            read(step, text[:, :5])


def test_full_attention_has_no_room():
    step = DecodingStep(own_language_model("longhorn + full attention"), room=8)
    with torch.no_grad(), pytest.raises(IndexError, match="room for 8 tokens"):
        read(step, texts(0)[:1, :9])


@pytest.mark.parametrize("variant", CAUSAL)
def test_a_static_cache_begins_anew_with_one_token(variant):
    """As a prompt of a single token does, when `generate` takes the cache of an earlier text."""
    model, text = language_model(variant), texts(0)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    fit_cache(cache, model.config)
    with torch.no_grad():
        model(texts(1)[:, :9], past_key_values=cache)
        cache.reset()
        found = [model(token, past_key_values=cache).logits for token in text.split(1, 1)]
        torch.testing.assert_close(torch.cat(found, 1), model(text).logits, rtol=0, atol=1e-4)


def test_refuses_what_no_program_can_be():
    with pytest.raises(TypeError, match="is an encoder-decoder"):
        DecodingStep(build("encoder-decoder"))
    model = teacher("gemma3_text").train()
    with pytest.raises(TypeError, match="layer 0 keeps a StaticSlidingWindowLayer of transformers"):
        DecodingStep(model)
    assert model.training
