"""Masked language modelling: what is hidden, and a run that resumes bit for bit and whose encoder classifies."""

import json

import numpy as np
import pytest
import torch
from _lib.documents import DataArguments, train_tokenizer
from _lib.token_masking import TokenMasking
from _lib.training import Trainer
from pretrain_mlm import MaskingArguments, pretrain
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, TrainingArguments

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
    folder = tmp_path_factory.mktemp("texts")
    lines = [" ".join(f"word {number} of {text}" for number in range(40)) for text in range(20)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")
    return f"{folder}/texts.jsonl"


def arguments(texts, output, model_type="spade", resume=None):
    options = {"max_steps": 8, "save_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "seed": 1}
    options |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    return (
        MaskingArguments(model_type, config=TINY[model_type], resume=resume),
        DataArguments([texts], sequence_length=32, tokenizer_vocab_size=290),
        TrainingArguments(str(output), logging_steps=2, **options),
    )


@pytest.mark.parametrize("model_type", TINY)
def test_resumes_bit_for_bit_and_the_encoder_classifies(texts, tmp_path, monkeypatch, model_type):
    whole = pretrain(*arguments(texts, tmp_path / "whole", model_type))
    assert whole["steps"] == 8 and whole["tokens"] == 8 * 4 * 32
    step, done = Trainer.training_step, []

    def killed(self, *inputs, **options):
        done.append(1)
        if len(done) == 7:
            raise KeyboardInterrupt
        return step(self, *inputs, **options)

    monkeypatch.setattr(Trainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(*arguments(texts, tmp_path / "killed", model_type))
    monkeypatch.setattr(Trainer, "training_step", step)
    resumed = pretrain(*arguments(texts, tmp_path / "killed", model_type, resume="auto"))
    assert resumed["validation_loss"] == whole["validation_loss"]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)

    classes = AutoModelForSequenceClassification
    _, report = classes.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert {key.split(".")[0] for key in report["missing_keys"]} <= {"score", "classifier"}


def test_bad_input():
    with pytest.raises(ValueError, match="model_type"):
        MaskingArguments()
    with pytest.raises(ValueError, match="masked_fraction=0"):
        MaskingArguments("spade", masked_fraction=0)
