"""Masked language modelling: what is hidden, and a run that resumes bit for bit and whose encoder classifies."""

import numpy as np
import pytest
from _lib.documents import DataArguments, load_documents, train_tokenizer
from _lib.masking import TokenMasking
from _lib.rows import packed_rows
from pretrain_mlm import MaskingArguments, pretrain
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.recipes import small

TINY = {
    "spade": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"sliding_window": 5},
    "bst": {"bidirectional": True, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    | {"num_attention_heads": 2, "sliding_window": 5, "ssm_layers": [0]},
}


def test_masks():
    tokenizer = train_tokenizer(["some text of words"], 290)
    with pytest.raises(ValueError, match="mask token"):
        TokenMasking(tokenizer)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    collator = TokenMasking(tokenizer, 0.25, seed=3)
    tokens = np.random.default_rng(0).integers(10, 270, 400)
    tokens[::10] = tokenizer.eos_token_id
    row = {"input_ids": tokens.tolist(), "row": 7}
    inputs, labels = (np.array(collator.corrupted(row)[name]) for name in ("input_ids", "labels"))
    hidden = labels != -100
    assert hidden.sum() == 90 and not hidden[::10].any()  # a quarter of the 360 that are not special
    assert (labels[hidden] == tokens[hidden]).all() and (inputs[~hidden] == tokens[~hidden]).all()
    assert (inputs == tokenizer.mask_token_id).sum() == 72
    others = hidden & (inputs != tokenizer.mask_token_id)
    assert (inputs[others] == tokens[others]).sum() in range(9, 12)  # a random token may be the same
    assert collator.corrupted(row) == collator.corrupted(row) != collator.corrupted(row | {"row": 8})
    collator.epoch = 1
    assert collator.corrupted(row)["input_ids"] != inputs.tolist()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.numbered_texts(tmp_path_factory.mktemp("texts"))


def arguments(texts, output, model_type="spade", resume=None, sequence_length=32, **data):
    options = {"max_steps": 8, "save_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "seed": 1}
    return (
        MaskingArguments(model_type, config=TINY[model_type], resume=resume),
        DataArguments([texts], sequence_length=sequence_length, tokenizer_vocab_size=290, **data),
        small.training(output, logging_steps=2, **options),
    )


def test_a_stream_goes_on_in_its_second_pass(texts, tmp_path):
    """transformers' Trainer would begin the pass anew. Saved after sixteen rows."""
    stream = {"streaming": True, "shuffle_buffer": 4, "validation_files": [texts], "sequence_length": 512}
    small.killed_and_resumed(
        lambda folder, resume: pretrain(*arguments(texts, folder, resume=resume, **stream)), tmp_path
    )
    _, data, _ = arguments(texts, tmp_path, **stream)
    rows = packed_rows(load_documents(data)[0], AutoTokenizer.from_pretrained(tmp_path / "whole"), data)
    assert 4 < sum(1 for _ in rows) < 16


@pytest.mark.parametrize("model_type", TINY)
def test_resumes_bit_for_bit_and_the_encoder_classifies(texts, tmp_path, model_type):
    whole = small.killed_and_resumed(
        lambda folder, resume: pretrain(*arguments(texts, folder, model_type, resume)), tmp_path
    )
    assert whole["steps"] == 8 and whole["tokens"] == 8 * 4 * 32
    classes = AutoModelForSequenceClassification
    _, report = classes.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert {key.split(".")[0] for key in report["missing_keys"]} <= {"score", "classifier"}
