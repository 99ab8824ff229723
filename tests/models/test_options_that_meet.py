"""Arguments that reach only a part of a model, or only one mode of it, are heard everywhere or refused by name."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_hybrid_ssm import (
    BstForMaskedLM,
    LonghornConfig,
    LonghornForTokenClassification,
    SpadeConfig,
    SpadeForCausalLM,
    SpadeForMaskedLM,
    SpadeForSequenceClassification,
)
from tests.tiny_models import (
    BST,
    EVERY,
    LONGHORN,
    OF_ONE_STACK,
    ROWS,
    SPADE,
    STUDENTS,
    TOKENS,
    config_of,
    ids_of,
    inputs_for,
    own_language_model,
    recording_cache,
)

FAMILIES = [row for row in OF_ONE_STACK if EVERY[row][0] != STUDENTS]
SEQ2SEQ = "encoder-decoder"


def training_without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable()
    return model.train()


@pytest.mark.parametrize("variant", OF_ONE_STACK)
def test_a_cache_that_holds_tokens_is_not_dropped_by_gradient_checkpointing(variant):
    model, ids = own_language_model(variant), ids_of(2, 12)
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).past_key_values
        wanted = model(ids).logits[:, 6:]
    training_without_dropout(model)
    with pytest.raises(ValueError, match=r"cache.*gradient checkpointing"):
        model(ids[:, 6:], past_key_values=cache)
    with torch.no_grad():  # nothing is computed again
        torch.testing.assert_close(model(ids[:, 6:], past_key_values=cache).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ROWS)
def test_generation_between_steps_of_training(variant):
    model, ids = own_language_model(variant), ids_of(2, 8)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, **options)
    assert torch.equal(training_without_dropout(model).generate(ids, **options), wanted)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q", "position_ids"])
def test_an_encoder_decoder_refuses_documents_in_a_row(name):
    model, ids = own_language_model(SEQ2SEQ), ids_of(1, 12)
    given = torch.tensor([0, 5, 12]) if name == "cu_seq_lens_q" else torch.tensor([[0] * 5 + [1] * 7])
    for call in (model, model.get_encoder()):
        with pytest.raises(ValueError, match=f"^{name}: an encoder-decoder reads one source"):
            call(ids, **({"decoder_input_ids": ids} if call is model else {}), **{name: given})


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("variant", ROWS)
def test_generate_takes_documents_by_their_positions(variant, name):
    given = torch.tensor([0, 5, 12]) if name == "cu_seq_lens_q" else torch.tensor([[0] * 5 + [1] * 7])
    with pytest.raises(ValueError, match=f"{name} says nothing of the tokens to come"):
        own_language_model(variant).generate(ids_of(1, 12), max_new_tokens=2, **{name: given})


@pytest.mark.parametrize("variant", ROWS)
def test_a_causal_model_stays_causal(variant):
    model = own_language_model(variant)
    with pytest.raises(ValueError, match=r"is_causal=False: .* is causal"):
        model(**inputs_for(model), is_causal=False)
    model(**inputs_for(model), is_causal=True)


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_configuration_stays_causal(variant):
    config = config_of(variant)
    config.is_causal = False
    with pytest.raises(ValueError, match=r"is_causal=False .* is no field"):
        AutoModelForCausalLM.from_config(config)


class MaskedSpade(SpadeForMaskedLM):
    pass


class MaskedBst(BstForMaskedLM):
    pass


@pytest.mark.parametrize("kind", [MaskedSpade, MaskedBst])
def test_labels_of_a_subclass_of_a_masked_language_model_are_not_shifted(kind):
    usual = kind.__bases__[0]
    sizes = (BST | {"bidirectional": True}) if kind is MaskedBst else SPADE
    torch.manual_seed(0)
    model = usual(usual.config_class(**TOKENS, **sizes)).eval()
    subclass = kind(model.config).eval()
    subclass.load_state_dict(model.state_dict())
    ids = ids_of(2, 12)
    assert subclass(ids, labels=ids).loss == model(ids, labels=ids).loss
    wanted = nn.functional.cross_entropy(model(ids).logits.flatten(0, 1).double(), ids.flatten())
    assert model(ids, labels=ids).loss.item() == pytest.approx(wanted.item(), rel=1e-5)


class MyLanguageModel(SpadeForCausalLM):
    pass


def test_a_classifier_whose_layers_would_all_be_new_is_refused(tmp_path):
    """What a folder of a subclass holds is not known by its name."""
    MyLanguageModel(SpadeConfig(**TOKENS, **SPADE)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a MyLanguageModel, and none of its layers are those of a Spade"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    found, told = SpadeForSequenceClassification.from_pretrained(
        tmp_path, causal_classifier=True, output_loading_info=True
    )
    assert found.config.causal_classifier and not any("layers" in name for name in told["missing_keys"])


@pytest.mark.parametrize("variant", [*FAMILIES, "student with a mixer"])
def test_a_copy_of_a_cache_that_records_its_past_has_the_same_model(variant):
    model, ids = own_language_model(variant), ids_of(1, 9)
    cache = recording_cache(model)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
    copied = copy.deepcopy(cache)
    seen = [
        [record.recompute.layer for layer in each.layers for record in getattr(layer, "history", ())]
        for each in (cache, copied)
    ]
    assert seen[0] and all(one is other for one, other in zip(*seen, strict=True))
    for each in (cache, copied):  # each has a past of its own
        each.crop(-2)
        with torch.no_grad():
            torch.testing.assert_close(
                model(ids[:, 3:], past_key_values=each).logits, model(ids).logits[:, 3:], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("variant", ROWS)
def test_labels_of_another_index_and_of_int32(variant):
    model = own_language_model(variant)
    inputs = inputs_for(model)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    labels[:, 3:6] = -100
    wanted = model(**inputs, labels=labels).loss
    other = torch.where(labels == -100, -1, labels)
    assert model(**inputs, labels=other, ignore_index=-1).loss == wanted
    if EVERY[variant][0] != STUDENTS:  # whose loss is their teacher's
        assert model(**inputs, labels=labels.int()).loss == wanted


def test_a_token_classifier_hears_which_class_to_ignore():
    torch.manual_seed(0)
    model = LonghornForTokenClassification(LonghornConfig(**TOKENS, **LONGHORN, num_labels=3)).eval()
    ids, classes = ids_of(2, 12), ids_of(2, 12) % 3
    wanted = model(ids, labels=torch.where(classes == 0, -100, classes)).loss
    assert model(ids, labels=classes, ignore_index=0).loss == wanted != model(ids, labels=classes).loss


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("keep", [5, torch.arange(9, 14)], ids=["the last", "indices"])
def test_the_fused_loss_of_some_positions(variant, keep):
    model, ids = own_language_model(variant), ids_of(2, 14)
    found = {}
    for fused in (False, True):
        model.config.use_linear_cross_entropy = fused
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.train()
        found[fused] = model(ids, labels=ids[:, 9:], logits_to_keep=keep).loss.item()
    assert found[True] == pytest.approx(found[False], rel=1e-5)


def test_a_causal_classifier_reads_the_last_real_token_with_and_without_a_mask():
    torch.manual_seed(0)
    config = SpadeConfig(**TOKENS, **SPADE, causal_classifier=True)
    model, ids = SpadeForSequenceClassification(config).double().eval(), ids_of(2, 12)
    with torch.no_grad():
        padded = ids.clone()
        padded[0, 8:] = config.pad_token_id
        torch.testing.assert_close(model(padded).logits[:1], model(ids[:1, :8]).logits)
        cache = model.model(ids[:, :6], use_cache=True).past_key_values
        pieces = model(ids[:, 6:], attention_mask=torch.ones_like(ids), past_key_values=cache).logits
        torch.testing.assert_close(pieces, model(ids).logits)
