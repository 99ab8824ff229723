"""Span corruption: T5's lengths, nothing lost between input and target; a run resumes bit for bit and its encoder
classifies."""

import json

import numpy as np
import pytest
import torch
from _lib.documents import DataArguments, train_tokenizer
from _lib.masking import SpanCorruption, corrupt, noise_mask, noise_of, sentinels_of, text_length
from datasets import Dataset
from finetune_glue import GlueArguments, glue
from hypothesis import given, settings
from hypothesis import strategies as st
from pretrain_seq2seq import SpanArguments, build_model, pretrain, with_other_inputs, with_sentinels
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.recipes import small

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_decoder_layers": 1}
TINY |= {"num_attention_heads": 2, "sliding_window": 5, "max_target_positions": 32}


def joined(inputs, target, sentinels, end):
    """The text: every sentinel of the input replaced by what follows it in the target."""
    assert inputs[-1] == target[-1] == end
    spans, number = {}, None
    for token in target[:-1]:
        if token in sentinels:
            number = token
            spans[number] = []
        else:
            spans[number].append(token)
    assert [token for token in inputs if token in sentinels] == list(spans)
    return [each for token in inputs[:-1] for each in spans.get(token, [token])]


@pytest.mark.parametrize(
    "wanted, noise, lengths",
    [(512, (0.15, 3), (568, 114)), (1024, (0.15, 3), (1137, 229)), (256, (0.15, 3), (284, 58)), (64, (0.5, 3), None)],
)
def test_lengths_are_those_of_t5(wanted, noise, lengths):
    text, target = text_length(wanted, *noise)
    assert lengths in (None, (text, target))
    for length, fits in ((text, True), (text + 1, False)):
        mask = noise_mask(length, *noise, np.random.default_rng(0))
        inputs, out = corrupt(range(length), mask, range(-1, -length, -1), 10**6)
        assert (len(inputs) <= wanted) == fits
        if fits:
            assert len(out) == target


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 300), st.floats(0.01, 0.95), st.floats(1, 20), st.integers(0, 2**31))
def test_input_and_target_restore_the_text(length, density, mean_span, seed):
    mask = noise_mask(length, density, mean_span, np.random.default_rng(seed))
    tokens, spans = noise_of(length, density, mean_span)
    assert mask.shape == (length,) and mask.sum() == tokens and not mask[0] and mask[-1]
    assert np.count_nonzero(np.diff(mask.astype(int)) == 1) == spans
    sentinels = range(10_000, 10_000 - spans, -1)
    inputs, target = corrupt(range(length), mask, sentinels, 10**6)
    assert (len(inputs), len(target)) == (length - tokens + spans + 1, tokens + spans + 1)
    assert joined(inputs, target, sentinels, 10**6) == list(range(length))


def test_divisions_are_equally_likely():
    random, seen = np.random.default_rng(0), {}
    for _ in range(3000):  # 2 spans in 3 + 3 tokens: 2 x 2 divisions
        mask = tuple(noise_mask(6, 0.5, 1.5, random).tolist())
        seen[mask] = seen.get(mask, 0) + 1
    assert len(seen) == 4 and all(650 < count < 850 for count in seen.values())


def test_collator():
    tokenizer = with_sentinels(train_tokenizer(["some text of words and more of them"], 300), trained_here=True)
    collator = SpanCorruption(tokenizer, 40, seed=3)
    rows = [{"input_ids": list(range(30, 30 + length)), "row": length} for length in (40, 23)]
    batch = collator(rows)
    assert sentinels_of(tokenizer) == tokenizer.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(100)])
    for row, inputs, mask, labels in zip(
        rows, *(batch[k].tolist() for k in ("input_ids", "attention_mask", "labels"))
    ):
        real = sum(mask)
        assert mask == [1] * real + [0] * (len(mask) - real) and set(inputs[real:]) <= {tokenizer.pad_token_id}
        labels = [label for label in labels if label != -100]
        assert joined(inputs[:real], labels, sentinels_of(tokenizer), tokenizer.eos_token_id) == row["input_ids"]
    assert torch.equal(collator(rows[::-1])["labels"][1], batch["labels"][0])  # whatever the order
    collator.epoch = 1
    later = collator(rows)["labels"].tolist()
    assert later != batch["labels"].tolist()
    # a worker that lives from epoch to epoch masks as the process that counts them
    loader = torch.utils.data.DataLoader(
        rows, batch_size=2, num_workers=1, collate_fn=collator, persistent_workers=True
    )
    for epoch, expected in ((0, batch["labels"].tolist()), (1, later)):
        collator.epoch = epoch
        assert [found["labels"].tolist() for found in loader] == [expected]
    with pytest.raises(ValueError, match="100 sentinels"):
        SpanCorruption(tokenizer, 4000)


@pytest.mark.parametrize("template", [None, "<|endoftext|> $A", "$A <|endoftext|>"])
def test_a_given_tokenizer_ends_texts_as_the_rows_do(template, tmp_path):
    known = with_sentinels(train_tokenizer(["some text"], 300), trained_here=True)
    special = [("<|endoftext|>", known.eos_token_id)]
    known.backend_tokenizer.post_processor = template and TemplateProcessing(single=template, special_tokens=special)
    known.save_pretrained(tmp_path)
    tokenizer = with_sentinels(AutoTokenizer.from_pretrained(tmp_path), trained_here=False)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        words = each("some text", add_special_tokens=False)["input_ids"]
        assert each(text_target="some text")["input_ids"] == [*words, each.eos_token_id]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.numbered_texts(tmp_path_factory.mktemp("texts"))


def arguments(texts, output, *, config=TINY, overwrite=False, resume=None, tokenizer=None, **data):
    options = {"max_steps": 8, "save_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "seed": 1}
    return (
        SpanArguments("spade_seq2seq", config=config, overwrite=overwrite, resume=resume),
        DataArguments([texts], sequence_length=32, tokenizer_vocab_size=290, tokenizer=tokenizer, **data),
        small.training(output, logging_steps=2, **options),
    )


def test_resumes_bit_for_bit_and_the_encoder_classifies(texts, tmp_path):
    whole = small.killed_and_resumed(
        lambda folder, resume: pretrain(*arguments(texts, folder, resume=resume)), tmp_path
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    assert tokenizer(text_target="word")["input_ids"][-1] == tokenizer.eos_token_id
    assert whole["steps"] == 8 and whole["lengths"] == {"text": 34, "input": 32, "target": 8}
    assert json.loads((tmp_path / "whole/results.json").read_text()) == whole

    seq2seq = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole")
    encoder, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", output_loading_info=True)
    head = {f"classifier.{name}.{part}" for name in ("dense", "out_proj") for part in ("weight", "bias")}
    assert report["missing_keys"] == head
    start = SpanArguments("spade_seq2seq", config=TINY, embeddings_from=str(tmp_path / "whole"))
    table = build_model(start, tokenizer, 8).get_input_embeddings().weight
    assert torch.equal(table, seq2seq.get_input_embeddings().weight)
    ids = torch.arange(100, 120).view(2, 10)
    hidden = encoder.eval().model(ids).last_hidden_state
    torch.testing.assert_close(hidden, seq2seq.eval().get_encoder()(ids).last_hidden_state)

    for split in ("train", "validation"):
        rows = [{"sentence": f"word {n} of", "label": n % 2} for n in range(8)]
        small.write_lines(tmp_path / f"glue/sst2/{split}.jsonl", rows)
    training = small.training(tmp_path / "glue-out", max_steps=2)
    found = glue(GlueArguments(["sst2"], str(tmp_path / "glue"), model_name_or_path=str(tmp_path / "whole")), training)
    assert 0 <= found["sst2"]["best"]["measures"]["validation"]["accuracy"] <= 100


def test_streams(texts, tmp_path):
    """New masks in each pass over the text, the same ones in each evaluation."""
    model, data, training = arguments(texts, tmp_path, streaming=True, validation_files=[texts])
    data.shuffle_buffer, training.eval_strategy, training.eval_steps = 8, "steps", 8
    results = pretrain(model, data, training)
    history = json.loads((tmp_path / "history.json").read_text())
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert len(evaluated) == 2 and evaluated[0] == evaluated[1] == results["validation_loss"]


def test_whether_the_encoder_is_read(texts, tmp_path):
    rows = Dataset.from_dict({"input_ids": [[1], [2, 3], [4]], "labels": [[5], [6], [7]]})
    assert with_other_inputs(rows).to_dict() == {"labels": [[5], [6], [7]], "input_ids": [[2, 3], [4], [1]]}
    changes = {}
    for deviation in (0.0, 0.5):  # with none, the encoder's states are all alike
        given = arguments(texts, tmp_path / str(deviation), config=TINY | {"initializer_range": deviation})
        results = pretrain(*given)
        changes[deviation] = abs(results["validation_loss_with_other_inputs"] - results["validation_loss"])
    assert changes[0.5] > 0.05 and changes[0.0] < 1e-4


def test_bad_input(texts, tmp_path):
    with pytest.raises(ValueError, match="sequence_length=2"):
        text_length(2, 0.15, 3)
    with pytest.raises(ValueError, match="max_target_positions=4"):
        pretrain(*arguments(texts, tmp_path, config=TINY | {"max_target_positions": 4}))
    train_tokenizer(["some text"], 260).save_pretrained(tmp_path / "tokenizer")
    assert AutoTokenizer.from_pretrained(tmp_path / "tokenizer").eos_token_id is not None
    with pytest.raises(ValueError, match="sentinels"):
        pretrain(*arguments(texts, tmp_path / "x", tokenizer=str(tmp_path / "tokenizer")))
