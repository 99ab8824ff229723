"""Masked language models: prediction from both sides, over the encoders."""

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)

import hf_hybrid_ssm
from tests.tiny_models import config_of

MASK = 60
CASES = {
    "spade s4 window": {},
    "spade s5 chunk post-norm": {},
    "spade adaptive": {},
    "bst s5 bidirectional": {},
    "bst sh s4d": {"bidirectional": True},
    "bst mh s4": {"bidirectional": True},
}
EVERY = pytest.mark.parametrize("case", CASES)


def build(case: str, **fields):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config_of(case, **CASES[case], **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def ids_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, MASK, (rows, length), generator=torch.Generator().manual_seed(seed))


def masked(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every fourth token hidden, and the labels."""
    hidden = (torch.arange(ids.shape[1]) % 4 == 1).expand_as(ids)
    return ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, -100)


def masking_tokenizer():
    from _lib.documents import train_tokenizer

    tokenizer = train_tokenizer(["one two three"], 280)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    return tokenizer


@EVERY
def test_every_token_sees_both_sides(case):
    """By gradient: the middle depends on the first and on the last token."""
    model, ids = build(case), ids_of(1, 11)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits[0, 5].logsumexp(0).backward()
    assert (embeddings.grad[0].abs().sum(1) > 0).all()


@EVERY
@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_is_the_cross_entropy_of_the_hidden_tokens(case, fused):
    no_dropout = {name: 0.0 for name in ("dropout", "attention_dropout") if hasattr(config_of(case), name)}
    more = {"embedding_dropout": 0.0, "adaptive_dropout": 0.0} if "spade" in case else {"final_dropout": 0.0}
    model = build(case, use_linear_cross_entropy=fused, **no_dropout, **more)
    ids, labels = masked(ids_of(2, 12))
    with torch.no_grad():
        logits = model(ids).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(model(ids, labels=labels).loss, expected)
        output = model.train()(ids, labels=labels)
        assert (output.logits is None) == fused
        torch.testing.assert_close(output.loss, expected)
        halves = model(ids, labels=labels, num_items_in_batch=2 * (labels != -100).sum()).loss
        torch.testing.assert_close(halves, expected / 2)


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_prediction(case, side):
    model, ids = build(case), ids_of(2, 11)
    mask = torch.ones_like(ids)
    pad, real = (slice(0, 4), slice(4, None)) if side == "left" else (slice(7, None), slice(0, 7))
    mask[1, pad], ids[1, pad] = 0, 0
    with torch.no_grad():
        both, alone = model(ids, attention_mask=mask).logits, model(ids[1:, real]).logits
    torch.testing.assert_close(both[1:, real], alone, rtol=1e-4, atol=1e-5)


@EVERY
def test_packed_documents_are_rows(case):
    model, ids = build(case), ids_of(1, 13)
    documents = torch.tensor([[0] * 5 + [1] * 8], dtype=torch.int32)
    with torch.no_grad():
        packed = model(ids, seq_idx=documents).logits
        parts = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], 1)
    torch.testing.assert_close(packed, parts, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["spade s4 window", "bst sh s4d"])
def test_stock_training_learns_what_only_both_sides_tell(case, tmp_path):
    """Each row is one token over and over: a hidden one is found from its neighbours, whichever side they are on."""
    tokenizer = masking_tokenizer()
    model = build(case, vocab_size=len(tokenizer))
    rows = [{"input_ids": [token] * 12} for token in range(40, 48)] * 4
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.25, random_replace_prob=0.0, seed=0)
    settings = {"max_steps": 60, "per_device_train_batch_size": 16, "learning_rate": 1e-2, "report_to": "none"}
    arguments = TrainingArguments(tmp_path, **settings, use_cpu=True, disable_tqdm=True, save_strategy="no")
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.3 * before


def test_fill_mask_pipeline():
    tokenizer = masking_tokenizer()
    model = build("spade s4 window", vocab_size=len(tokenizer))
    found = pipeline("fill-mask", model=model, tokenizer=tokenizer)("one [MASK] three", top_k=3)
    assert len(found) == 3 and all(0 < one["score"] < 1 and "three" in one["sequence"] for one in found)


def test_one_side_is_refused():
    with pytest.raises(ValueError, match="BstForMaskedLM needs bidirectional=True, got bidirectional=False"):
        hf_hybrid_ssm.BstForMaskedLM(config_of("bst sh s4d"))
    with pytest.raises(ValueError, match="pixel_input=True"):
        hf_hybrid_ssm.SpadeForMaskedLM(config_of("spade s4 window", pixel_input=True))
    with pytest.raises(ValueError, match="labels must have the input's shape"):
        build("spade s4 window")(ids_of(2, 7), labels=ids_of(2, 6))
