"""Rare words by the distance of their last mention: what is a mention, what it costs, and what is averaged."""

import json

import pytest
import rare_words
import torch
from _lib.documents import train_tokenizer
from rare_words import RareWordsArguments, known_words, mean_over_words, rows_of
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

import hf_hybrid_ssm  # noqa: F401 - registers the families

COMMON = "a house and a tree stand by the long river . "
NAMES = ["Xantippe", "Quimby", "Voronoi"]
TRAINING = COMMON * 40 + "Quimby Quimby Quimby Voronoi"
HELD_OUT = "".join(COMMON * turn + f"{NAMES[turn % 3]} and Xantippe's Zug " for turn in (1, 2, 3, 1, 0, 2))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TRAINING], 300)


@pytest.mark.parametrize("length", [16, 60, 120])
def test_mentions_are_those_that_a_reader_finds(tokenizer, length):
    """By decoding each row's tokens: the words are there, and nothing between them is the same word."""
    known = known_words([TRAINING])
    assert known["Quimby"] == 3 and known["Xantippe"] == 0
    rows = rows_of(HELD_OUT, tokenizer, length, known, most=1)
    tokens = tokenizer(HELD_OUT)["input_ids"]
    assert len(rows) == len(tokens) // (length - 1)
    assert torch.cat([ids[1:] for ids, _ in rows]).tolist() == tokens[: len(rows) * (length - 1)]
    found = 0
    for ids, mentions in rows:
        assert len(ids) == length and ids[0] == tokenizer.bos_token_id
        text = tokenizer.decode(ids[1:])
        for number, mention in enumerate(mentions):
            assert mention.word in ("Xantippe", "Voronoi")  # "Quimby" is known, "Zug" is short
            assert mention.word in tokenizer.decode(ids[mention.begin : mention.end])
            for less in (ids[mention.begin + 1 : mention.end], ids[mention.begin : mention.end - 1]):
                assert mention.word not in tokenizer.decode(less)
            earlier = [other for other in mentions[:number] if other.word == mention.word]
            assert mention.last == (earlier[-1].begin if earlier else None)
            assert mentions[mention.first] is (earlier[0] if earlier else mention)
            found += 1
        whole = sum(text.count(name) for name in ("Xantippe", "Voronoi"))
        assert whole == len(mentions)
    assert found > 3


def test_means_are_over_words():
    found = mean_over_words({"one": [1.0, 3.0], "two": [5.0], "three": [2.0]})
    low, high = stats.t.interval(0.95, 2, loc=3.0, scale=stats.sem([2.0, 5.0, 2.0]))
    assert (found["mentions"], found["words"], found["mean"]) == (4, 3, 3.0)
    assert found["half_width_of_95_percent"] == pytest.approx((high - low) / 2)
    assert mean_over_words({})["mean"] is None


@pytest.fixture
def settings(tokenizer, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2, "vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", **sizes))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name, text in (("train", TRAINING), ("held_out", HELD_OUT)):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return {
        "models": {"tiny": str(tmp_path / "model")},
        "files": [str(tmp_path / "held_out.txt")],
        "train_files": [str(tmp_path / "train.txt")],
        "most": 1,
        "row_length": 128,
        "distances": [1, 64, 128],
        "output_dir": str(tmp_path / "out"),
        "results": str(tmp_path / "kept"),
    }


def test_losses_are_those_of_the_words_tokens(settings, tokenizer, tmp_path):
    """Against transformers' own loss, with every label but a word's ignored."""
    figures = rare_words.rare_words(RareWordsArguments(**settings))
    assert json.loads((tmp_path / "kept.json").read_text(encoding="utf-8"))["models"] == figures["models"]
    assert (tmp_path / "kept.png").stat().st_size > 1000 and (tmp_path / "out/rare_words.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(settings["models"]["tiny"])
    rows = rows_of(HELD_OUT, tokenizer, 128, known_words([TRAINING]), 1)
    first, saved = {}, {"1-63": {}, "64-127": {}}
    for ids, mentions in rows:
        of_words = []
        for mention in mentions:
            labels = torch.full_like(ids, -100)
            labels[mention.begin : mention.end] = ids[mention.begin : mention.end]
            with torch.no_grad():
                mean = model(ids[None], labels=labels[None]).loss
            of_words.append(float(mean) * (mention.end - mention.begin))
            if mention.last is None:
                first.setdefault(mention.word, []).append(of_words[-1])
            else:
                name = "1-63" if mention.begin - mention.last < 64 else "64-127"
                saved[name].setdefault(mention.word, []).append(of_words[mention.first] - of_words[-1])
    found = figures["models"]["tiny"]
    assert found["first"]["mean"] == pytest.approx(mean_over_words(first)["mean"], rel=1e-4)
    assert any(words for words in saved.values())
    for name, words in saved.items():
        assert found["saved"][name]["mentions"] == sum(map(len, words.values()))
        if words:
            assert found["saved"][name]["mean"] == pytest.approx(mean_over_words(words)["mean"], abs=1e-3)


def test_text_without_such_words_is_refused(settings, tmp_path):
    (tmp_path / "held_out.txt").write_text(COMMON * 30, encoding="utf-8")
    with pytest.raises(ValueError, match=r"no row of .* has a rare word twice"):
        rare_words.rare_words(RareWordsArguments(**settings))
    assert not (tmp_path / "kept.json").exists()
