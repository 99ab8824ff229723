"""The word-level protocol: fairseq's dictionary, an unbroken stream, blocks with context, perplexity per word."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from _lib.settings import read_settings
from pretrain_clm import ModelArguments
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from word_lm import Blocks, WordArguments, WordTrainer, lines_of, stream_of, word_lm, word_tokenizer

from tests.recipes.test_distributed import RECIPE, launched

RECIPE_ARGUMENTS = (ModelArguments, WordArguments, TrainingArguments)

LINES = [" = Title = \n", "\n", "the cat , the dog <unk> the\n", "a</s>b the cat\n"]


def test_vocabulary_and_stream_are_fairseqs():
    """Ids that fairseq's Dictionary gave for these lines (finalize with its padding factor of 8)."""
    tokenizer = word_tokenizer(LINES)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [
        "<s>", "<pad>", "</s>", "<unk>", "the", "=", "cat", ",", "Title", "a</s>b", "dog", *_made_up(5),
    ]  # fmt: skip
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    stream = stream_of([*LINES, "an unseen the"], tokenizer)
    assert stream.tolist() == [5, 8, 5, 2, 2, 4, 6, 7, 4, 10, 3, 4, 2, 9, 4, 6, 2, 3, 3, 4, 2]


def _made_up(count):
    return [f"madeupword{number:04}" for number in range(count)]


@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("size", [1, 8, 21])
def test_blocks_score_every_token_once_with_its_context(size, context):
    stream = np.arange(10, 10 + size, dtype=np.int32)
    rows = Blocks(stream, 8, end=2, context=context)
    scored = []
    for row in rows:
        labels, ids = row["labels"], row["input_ids"]
        assert ids.shape == labels.shape == (9,)
        assert labels[0] == -100
        at = (labels != -100).nonzero().flatten()
        assert torch.equal(labels[at], ids[at])
        assert torch.equal(at, torch.arange(at[0], at[-1] + 1))
        first = int(labels[at[0]]) - 10
        assert int(at[0]) == 1 + min(first, context)  # so many words are read before the first scored one, and one
        for position in range(int(at[-1])):  # what is read is the stream, without a gap
            assert ids[position + 1] == ids[position] + 1 or (position == 0 and ids[0] == 2)
        scored += (labels[at] - 10).tolist()
    assert scored == list(range(size))
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="the stream has no token"):
        Blocks(np.zeros(0, dtype=np.int32), 8, end=2)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        list(lines_of(WordArguments(train_files=["/nowhere/*.tokens"]), "train"))
    both = (
        ModelArguments("longhorn", muon=True),
        WordArguments(train_files=["some"]),
        TrainingArguments("unused", optim="sgd"),
    )
    with pytest.raises(ValueError, match="muon=True and optim=sgd"):
        word_lm(*both)


MODEL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "sliding_window": 4,
    "ssm_state_size": 4, "adaptive_cutoffs": [8, 16], "adaptive_factor": 2,
}  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_recipe_scores_its_model_word_by_word(processes, tmp_path):
    words, random = [f"w{number}" for number in range(20)], np.random.default_rng(0)
    for split, size in (("train", 60), ("validation", 11), ("test", 10)):
        text = "".join(" ".join(random.choice(words, random.integers(0, 9))) + " \n" for _ in range(size))
        (tmp_path / f"{split}.tokens").write_text(text, encoding="utf-8")
    settings = {f"{split}_files": [str(tmp_path / f"{split}.tokens")] for split in ("train", "validation", "test")}
    settings |= {
        "model_type": "spade",
        "preset": "spade-lm-wt103",
        "config": MODEL,
        "sequence_length": 16,
        "context": 5,
    }
    settings |= {"max_steps": 3, "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.1}
    settings |= {"output_dir": str(tmp_path / "out"), "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings), encoding="utf-8")
    if processes == 1:
        word_lm(*read_settings("word_lm.py", RECIPE_ARGUMENTS, [str(tmp_path / "settings.yaml")]))
    else:
        command = [sys.executable, RECIPE.with_name("word_lm.py"), tmp_path / "settings.yaml", "ddp_backend=gloo"]
        launched(command, ranks=2)
    found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (model.config.bos_token_id, model.config.pad_token_id, model.config.eos_token_id) == (0, 1, 2)
    assert model.config.vocab_size == found["vocabulary"] == 24
    stream = stream_of((tmp_path / "test.tokens").read_text(encoding="utf-8").splitlines(), tokenizer)
    losses = []
    for first in range(0, len(stream), 11):  # each block alone, with what lies before it
        start = max(0, first - 5)
        ids = torch.tensor([stream[start - 1] if start else 2, *stream[start : first + 11]])[None]
        logits = model(ids).logits[0, first - start : -1].log_softmax(-1)
        losses += (-logits[torch.arange(len(logits)), ids[0, 1 + first - start :]]).tolist()
    assert found["test"]["words"] == len(losses) == len(stream)
    assert found["test"]["loss_per_word"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["test"]["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_optimizer_is_nesterovs_with_the_given_momentum(tmp_path):
    model = torch.nn.Linear(2, 2)
    training = TrainingArguments(str(tmp_path), optim="sgd", learning_rate=1.0, report_to="none", use_cpu=True)
    trainer = WordTrainer(model=model, args=training)
    trainer.momentum = 0.9
    groups = trainer.create_optimizer().param_groups
    assert {(group["momentum"], group["nesterov"], group["lr"]) for group in groups} == {(0.9, True, 1.0)}
