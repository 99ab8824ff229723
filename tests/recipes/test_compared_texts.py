"""Two texts read apart and compared token by token: the paper's equation, padding, learning, and other encoders."""

import math
import random

import numpy as np
import pytest
import torch
from _lib.compared_texts import ComparedTexts, PairCollator, compared
from datasets import Dataset
from finetune_glue import TASKS, GlueArguments, glue, tokenized_apart
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, BertConfig, PreTrainedTokenizerFast

from hf_hybrid_ssm import SpadeConfig
from tests.recipes.small import write_lines
from tests.recipes.test_finetune_glue import training

BERT = BertConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def by_the_equation(text, other):
    """Lists of vectors, in loops and float64."""
    width = len(text[0])
    means = np.zeros(3 * width)
    for state in text:
        weights = [math.exp(sum(a * b for a, b in zip(state, each)) / math.sqrt(width)) for each in other]
        found = sum(weight / sum(weights) * np.array(each) for weight, each in zip(weights, other))
        means += np.concatenate([state, np.abs(np.array(state) - found), np.array(state) * found]) / len(text)
    return means


def test_tokens_find_their_like_as_in_the_equation():
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(3, length, 5, generator=draw, dtype=torch.float64) for length in (4, 7))
    lengths, others = [4, 2, 1], [1, 7, 3]
    real, other_real = (torch.arange(size) < torch.tensor(of)[:, None] for size, of in ((4, lengths), (7, others)))
    found = compared(first, real, second, other_real)
    for row, (one, other) in enumerate(zip(lengths, others)):
        expected = by_the_equation(first[row, :one].tolist(), second[row, :other].tolist())
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-12)


def pairs(count=8, seed=0):
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        first, second = ([draw.randrange(1, 40) for _ in range(draw.randint(1, 9))] for _ in range(2))
        rows.append({"first": first, "second": second, "labels": draw.randrange(2)})
    return rows


@pytest.mark.parametrize("encoder", ["bert", "spade"])
def test_padding_changes_nothing(encoder):
    fields = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BERT
    if encoder == "spade":
        config = SpadeConfig(**fields, intermediate_size=16, sliding_window=5)
    model = ComparedTexts(AutoModel.from_config(config), 2).eval()
    torch.nn.init.normal_(model.classifier.weight)
    rows = pairs()
    together = model(**PairCollator(0)(rows))
    alone = torch.cat([model(**PairCollator(0)([row])).logits for row in rows])
    torch.testing.assert_close(together.logits, alone, rtol=1e-4, atol=1e-5)
    labels = torch.tensor([row["labels"] for row in rows])
    torch.testing.assert_close(together.loss, torch.nn.functional.cross_entropy(alone, labels), rtol=1e-4, atol=1e-5)


def test_a_last_batch_of_one_row_trains():
    model = ComparedTexts(AutoModel.from_config(BERT), 1, middle=2.5).train()
    batch = PairCollator(0)(pairs(1))
    assert model(**batch).logits.item() == pytest.approx(2.5)
    model(**batch).loss.backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.classifier.parameters())


def write_overlaps(folder, rows=400):
    """Two texts of five words each; the label is how many of the second are in the first."""
    words = [f"{a}{b}" for a in "bdfgklmn" for b in ("ana", "ori", "ute", "esk")]
    for split in ("train", "validation"):
        draw, lines = random.Random(split), []
        for _ in range(rows):
            first, label = draw.sample(words, 5), draw.randrange(6)
            others = draw.sample([word for word in words if word not in first], 5 - label)
            second = draw.sample(first, label) + others
            draw.shuffle(second)
            texts = {"sentence1": " ".join(first), "sentence2": " ".join(second)}
            lines.append(texts | {"label": float(label)})
        write_lines(folder / "stsb" / f"{split}.jsonl", lines)


def test_apart_learns_how_many_words_are_shared_and_together_does_not(tmp_path):
    write_overlaps(tmp_path)
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config |= {"sliding_window": 65, "pooling": "mean"}
    found = {}
    for way in ("apart", "together"):
        arguments = GlueArguments(["stsb"], str(tmp_path), model_type="spade", config=config, pairs=way)
        results = glue(arguments, training(tmp_path / way, num_train_epochs=4, learning_rate=3e-3))
        found[way] = results["stsb"]["best"]["measures"]["validation"]["pearson"]
    assert found["apart"] > 80 and found["together"] < 50, found


def test_one_text_is_read_as_ever(tmp_path):
    """`pairs` says nothing of tasks that have no pairs."""
    task = TASKS["sst2"]
    assert len(task.columns) == 1
    for split in ("train", "validation"):
        lines = [{"sentence": f"word {number}", "label": number % 2} for number in range(33)]
        write_lines(tmp_path / "sst2" / f"{split}.jsonl", lines)
    config = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    said = []
    for way in ("apart", "together"):
        arguments = GlueArguments(["sst2"], str(tmp_path), model_type="longhorn", config=config, pairs=way)
        said.append(glue(arguments, training(tmp_path / way, max_steps=2))["sst2"]["best"]["measures"])
    assert said[0] == said[1]


def test_an_empty_text_and_one_that_is_too_long_with_a_tokenizer_without_an_end():
    """As BERT's, which has no end-of-text token."""
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    rows = Dataset.from_dict({"sentence1": ["", "a " * 30], "sentence2": ["a b", "b b"], "label": [1, 0]})
    found = tokenized_apart(rows, TASKS["rte"], tokenizer, 10)
    assert found["first"][:] == [[0], [2] * 6] and found["second"][:] == [[2, 3], [3, 3]]
    assert found["length"][:] == [2, 6]
    batch = PairCollator(tokenizer.pad_token_id)(list(found))
    assert batch["attention_mask"].sum(-1).tolist() == [[1, 2], [6, 2]]
