"""Token classification and question answering: transformers' heads over every family."""

import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification, pipeline

from hf_hybrid_ssm.models import FAMILIES
from tests.tiny_models import EVERY, HEADED, config_of, ids_of

HEADS = {
    "TOKEN_CLASSIFICATION": (AutoModelForTokenClassification, "score"),
    "QUESTION_ANSWERING": (AutoModelForQuestionAnswering, "qa_outputs"),
}
EVERY_ROW = pytest.mark.parametrize("row", HEADED)
EVERY_HEAD = pytest.mark.parametrize("head", HEADS)


def build(row: str, head: str):
    torch.manual_seed(0)
    model = HEADS[head][0].from_config(config_of(row, num_labels=3)).eval()
    for parameter in model.get_submodule(HEADS[head][1]).parameters():
        torch.nn.init.normal_(parameter)  # so that a head that was drawn anew would show
    return model


def scores(output) -> torch.Tensor:
    """(B, L, classes), or (B, L, 2) of start and end."""
    return output.logits if "logits" in output else torch.stack((output.start_logits, output.end_logits), -1)


@EVERY_HEAD
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_auto_class_builds_the_familys_own_class(family, head):
    row = next(row for row in HEADED if EVERY[row][0] == family.model_type)
    assert type(build(row, head)).__name__ == family.heads[f"MODEL_FOR_{head}"]


@EVERY_HEAD
@EVERY_ROW
def test_learns_one_batch(row, head):
    model, ids = build(row, head).train(), ids_of(4, 9)
    if head == "TOKEN_CLASSIFICATION":  # the class is in the token itself
        targets = {"labels": ids % 3}
    else:
        targets = {"start_positions": torch.tensor([1, 3, 5, 7]), "end_positions": torch.tensor([2, 4, 6, 8])}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(ids, **targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


def test_ignored_labels_do_not_count():
    model, ids = build("longhorn", "TOKEN_CLASSIFICATION"), ids_of(2, 9)
    labels = ids % 3
    with torch.no_grad():
        logits = model(ids).logits
        labels[:, 4:] = -100
        loss = model(ids, labels=labels).loss
    expected = torch.nn.functional.cross_entropy(logits[:, :4].flatten(0, 1), labels[:, :4].flatten())
    torch.testing.assert_close(loss, expected)


def test_pipeline_classifies_tokens():
    from _lib.documents import train_tokenizer

    tokenizer = train_tokenizer(["one two three"], 280)
    model = build("spade s4 window", "TOKEN_CLASSIFICATION")
    model.resize_token_embeddings(len(tokenizer))
    found = pipeline("token-classification", model=model, tokenizer=tokenizer)("one two three")
    assert found and {entity["entity"] for entity in found} <= {"LABEL_0", "LABEL_1", "LABEL_2"}
