"""Classifiers that start from a language model's checkpoint, multiple choice, and features from a pipeline."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    pipeline,
)

import hf_hybrid_ssm
from tests.memory import in_own_memory
from tests.tiny_models import HEADED, ROWS, config_of, ids_of, own_language_model

AUTOS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForQuestionAnswering": AutoModelForQuestionAnswering,
    "ForMultipleChoice": AutoModelForMultipleChoice,
}
HEADS = {"score", "qa_outputs", "classifier"}
LANGUAGE_MODELS = [row for row in HEADED if row != "encoder-decoder"]
SPADE = [row for row in LANGUAGE_MODELS if "spade" in row]


@pytest.mark.parametrize("head", AUTOS)
@pytest.mark.parametrize("row", LANGUAGE_MODELS)
def test_every_layer_of_a_language_model_is_taken_over(row, head, tmp_path):
    """Only the head is new: the classifier's last layer says of a text what the language model's does."""
    model, ids = own_language_model(row), ids_of(2, 9)
    model.save_pretrained(tmp_path)
    classifier, report = AUTOS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert {key.split(".")[0] for key in report["missing_keys"]} <= HEADS and not report["mismatched_keys"]
    with torch.no_grad():
        hidden = in_own_memory(classifier).base_model(ids).last_hidden_state
        assert torch.equal(hidden, in_own_memory(model).base_model(ids).last_hidden_state)


@pytest.mark.parametrize("row", SPADE)
def test_spade_classifiers_stay_what_they_are(row, tmp_path):
    own_language_model(row).save_pretrained(tmp_path / "lm")
    direct = hf_hybrid_ssm.SpadeForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=4).eval()
    assert type(direct.model).__name__ == "SpadeModel" and direct.config.causal_classifier
    assert direct.config.pooling == "last" and direct.config.num_labels == 4
    direct.save_pretrained(tmp_path / "classifier")
    given = AutoConfig.from_pretrained(tmp_path / "lm")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", config=given)
    assert given.causal_classifier is None  # the caller's own stays as it was
    again, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "classifier", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = ids_of(2, 9)
    with torch.no_grad():
        assert torch.equal(in_own_memory(again.eval())(ids).logits, direct(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path / "classifier")).__name__ == "SpadeModel"
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "classifier", output_loading_info=True)
    assert not report["missing_keys"]
    # an encoder where it is asked for, and where the checkpoint is one
    asked = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", causal_classifier=False)
    assert type(asked.model).__name__ == "SpadeEncoderModel" and asked.config.pooling == "first"
    asked.save_pretrained(tmp_path / "encoder")
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path / "encoder")
    assert type(tagger.model).__name__ == "SpadeEncoderModel"


def test_a_new_spade_classifier_reads_the_encoder():
    model = AutoModelForSequenceClassification.from_config(config_of("spade s4 window"))
    assert type(model.model).__name__ == "SpadeEncoderModel" and model.config.causal_classifier is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_causal_spade_classifier_reads_the_last_real_token(side):
    torch.manual_seed(0)
    config = config_of("spade s4 window", causal_classifier=True, num_labels=3)
    model, ids = AutoModelForSequenceClassification.from_config(config).eval(), ids_of(2, 11)
    pad, real = (slice(0, 4), slice(4, None)) if side == "left" else (slice(7, None), slice(0, 7))
    mask = torch.ones_like(ids)
    mask[1, pad], ids[1, pad] = 0, 0
    with torch.no_grad():
        padded, alone = model(ids, attention_mask=mask).logits, model(ids[1:, real]).logits
        torch.testing.assert_close(padded[1:], alone, rtol=1e-4, atol=1e-5)
        hidden = model.model(ids[1:, real]).last_hidden_state[:, -1]
        torch.testing.assert_close(model.classifier(hidden), alone)


def test_spade_fields_that_contradict_each_other():
    with pytest.raises(ValueError, match="pooling='first' with causal_classifier=True"):
        config_of("spade s4 window", causal_classifier=True, pooling="first")


# -- multiple choice --------------------------------------------------------------------------------------------------

CHOOSING = [*LANGUAGE_MODELS, "bst s5 bidirectional"]


@pytest.mark.parametrize("row", CHOOSING)
def test_choices_are_scored_each_for_itself(row):
    torch.manual_seed(0)
    model, ids = AutoModelForMultipleChoice.from_config(config_of(row)).eval(), ids_of(2, 3, 9)
    mask = torch.ones_like(ids)
    mask[1, 2, 5:] = 0
    labels = torch.tensor([2, 0])
    with torch.no_grad():
        output = model(ids, attention_mask=mask, labels=labels)
        assert output.logits.shape == (2, 3)
        for question in range(2):
            for choice in range(3):
                text = ids[question, choice][mask[question, choice] == 1]
                alone = model(text[None, None]).logits[0, 0]
                torch.testing.assert_close(output.logits[question, choice], alone, rtol=1e-4, atol=1e-5)
        expected = torch.nn.functional.cross_entropy(output.logits, labels)
        torch.testing.assert_close(output.loss, expected)
        embeddings = model.get_input_embeddings()(ids)
        given = model(inputs_embeds=embeddings, attention_mask=mask, return_dict=False)[0]
        torch.testing.assert_close(given, output.logits)


@pytest.mark.parametrize("row", ["longhorn", "spade s4 window"])
def test_choosing_is_learnt(row):
    torch.manual_seed(0)
    model, ids = AutoModelForMultipleChoice.from_config(config_of(row)).train(), ids_of(8, 2, 7)
    labels = torch.arange(8) % 2
    ids[torch.arange(8), labels, -1], ids[torch.arange(8), labels, 0] = 5, 5  # the mark of the right one
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(40):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model.eval()(ids).logits.argmax(1) == labels).all()


def test_bad_choices():
    model = AutoModelForMultipleChoice.from_config(config_of("longhorn"))
    with pytest.raises(ValueError, match=r"input_ids must have shape \(batch, choices, length\), got \(2, 9\)"):
        model(ids_of(2, 9))
    with pytest.raises(ValueError, match=r"labels has classes from 3 to 3, but num_labels=3"):
        model(ids_of(1, 3, 9), labels=torch.tensor([3]))
    with pytest.raises(ValueError, match="paired_input=True"):
        AutoModelForMultipleChoice.from_config(config_of("spade s4 window", paired_input=True))


# -- features ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_features_of_a_pipeline_are_those_of_the_base_model(row, tmp_path):
    from _lib.documents import train_tokenizer

    tokenizer = train_tokenizer(["one two three"], 280)
    config = config_of(row, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    # of an encoder-decoder: its encoder, as AutoModel's decoder has nothing to read
    auto = AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel
    auto.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path).eval()
    found = pipeline("feature-extraction", model=str(tmp_path))("one two three", return_tensors=True)
    ids = tokenizer("one two three", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(found, model(ids).last_hidden_state)
