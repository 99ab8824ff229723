"""The recipe: trains, resumes to the same weights, and what it writes can be evaluated."""

import json

import pytest
import torch
from _lib.documents import DataArguments, load_documents
from _lib.rows import packed_rows
from _lib.scoring import bigram_loss, sliding_loss, token_losses, unigram_loss
from _lib.standard_text import standard_documents
from _lib.training import Trainer
from evaluate_lm import EvaluationArguments, evaluate
from pretrain_clm import ModelArguments, build_model, pretrain
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes import small
from tests.tiny_models import built

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.standard_texts(tmp_path_factory.mktemp("texts"))


def settings(texts, output, *, model_type="longhorn", config=TINY, resume=None, **training):
    options = {"learning_rate": 3e-3, "per_device_train_batch_size": 2, "logging_steps": 2}
    return (
        ModelArguments(model_type=model_type, config=config, resume=resume),
        DataArguments(
            [f"{texts}/train.jsonl"], [f"{texts}/held_out.jsonl"], sequence_length=64, tokenizer_vocab_size=400
        ),
        small.training(output, **options | training),
    )


def test_trains_resumes_and_evaluates(texts, tmp_path):
    whole = small.killed_and_resumed(
        lambda folder, resume: pretrain(*settings(texts, folder, max_steps=12, save_steps=4, resume=resume)), tmp_path
    )
    assert whole["steps"] == 12 and whole["tokens"] == 12 * 2 * 64
    history = json.loads((tmp_path / "whole/history.json").read_text())
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert (tmp_path / "whole/loss.png").stat().st_size > 1000
    assert json.loads((tmp_path / "whole/results.json").read_text()) == whole

    arguments = EvaluationArguments(
        str(tmp_path / "whole"), [f"{texts}/held_out.jsonl"], length=32, factors=[1, 4], max_tokens=600, new_tokens=5
    )
    figures = evaluate(arguments)
    assert figures["sliding"]["perplexity"] < 400
    assert [point["length"] for point in figures["extrapolation"]] == [32, 128]
    assert figures["samples"][0]["continuation"]
    assert json.loads((tmp_path / "whole/evaluation.json").read_text()) == figures
    assert (tmp_path / "whole/extrapolation.png").exists()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")
def test_trains_and_resumes_with_muon(texts, tmp_path):
    def with_muon(folder, resume=None, **options):
        model, *rest = settings(texts, folder, max_steps=8, save_steps=4, resume=resume, **options)
        model.muon = True
        return model, *rest

    whole = small.killed_and_resumed(lambda *given: pretrain(*with_muon(*given)), tmp_path)
    adamw = pretrain(*settings(texts, tmp_path / "adamw", max_steps=8))
    assert whole["train_loss"] != adamw["train_loss"]
    for optim in ("adafactor", "adamw_torch_8bit"):
        with pytest.raises(ValueError, match=f"muon=True and optim={optim}, optim_args=None exclude each other"):
            pretrain(*with_muon(tmp_path / "both", optim=optim))
    assert whole["muon"] and "muon" not in adamw


class Shifted(torch.optim.SGD):
    """As a schedule-free optimizer does, it trains other weights than it evaluates: by 1."""

    is_training = True

    def _move(self, is_training):
        if is_training != self.is_training:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(1 if is_training else -1)
        self.is_training = is_training

    def train(self):
        self._move(True)

    def eval(self):
        self._move(False)


def test_saves_the_weights_that_are_evaluated(tmp_path):
    model = built("longhorn")
    before = model.get_input_embeddings().weight.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 30, (8, 6))]
    arguments = small.training(tmp_path, max_steps=4, save_steps=2)
    Trainer(model, arguments, train_dataset=rows, optimizers=(Shifted(model.parameters(), lr=0.0), None)).train()
    for step in (2, 4):
        saved = load_file(tmp_path / f"checkpoint-{step}/model.safetensors")["model.embed_tokens.weight"]
        torch.testing.assert_close(saved, before - 1)


def test_streams_and_resumes(texts, tmp_path):
    """Shuffled; ended in the second pass, a resumed run goes on with the rows that an uninterrupted one reads."""

    def streamed(folder, resume=None, **options):
        model, data, training = settings(texts, folder, max_steps=10, save_steps=4, resume=resume, **options)
        data.streaming, data.sequence_length, data.max_validation_rows = True, 2048, 2
        data.shuffle_buffer = 8
        return model, data, training

    whole = small.killed_and_resumed(lambda *given: pretrain(*streamed(*given)), tmp_path)
    _, data, training = streamed(tmp_path / "none")
    rows = packed_rows(load_documents(data)[0], AutoTokenizer.from_pretrained(tmp_path / "whole"), data)
    a_pass = sum(1 for _ in rows) / training.per_device_train_batch_size
    assert 3 < a_pass < 6
    other = pretrain(*streamed(tmp_path / "other order", data_seed=1))
    assert other["train_loss"] != whole["train_loss"]


def test_starts_with_the_embeddings_of_another_model(texts, tmp_path):
    pretrain(*settings(texts, tmp_path / "first", max_steps=1))
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    arguments = ModelArguments("longhorn", config=TINY, embeddings_from=str(tmp_path / "first"))
    model = build_model(arguments, AutoTokenizer.from_pretrained(tmp_path / "first"))
    assert torch.equal(model.get_input_embeddings().weight, first.get_input_embeddings().weight)


def test_validation_loss_is_the_mean_over_targets(texts, tmp_path):
    """However rows are batched, the last of which is mostly filling."""
    results = [
        pretrain(*settings(texts, tmp_path / str(size), max_steps=1, per_device_eval_batch_size=size))
        for size in (1, 2, 7, 100)
    ]
    first, *others = (result["validation_loss"] for result in results)
    assert others == pytest.approx([first] * 3, rel=1e-6)


def test_sliding_window_scores_each_token_once(texts, tmp_path):
    pretrain(*settings(texts, tmp_path, max_steps=1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(0, 300, (50,))
    assert sliding_loss(model, [tokens], 50, 25) == pytest.approx(token_losses(model, tokens).mean().item(), rel=1e-5)
    short = [token_losses(model, tokens[:12]), token_losses(model, tokens[8:20])[-8:]]
    assert sliding_loss(model, [tokens[:20]], 12, 8) == pytest.approx(torch.cat(short).mean().item(), rel=1e-5)
    short += [token_losses(model, tokens[20:26])]  # a second document begins afresh
    found = sliding_loss(model, [tokens[:20], tokens[20:26]], 12, 8)
    assert found == pytest.approx(torch.cat(short).mean().item(), rel=1e-5)


def test_bad_input(texts, tmp_path):
    pretrain(*settings(texts, tmp_path, max_steps=1))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vocab_size=10"):
        build_model(ModelArguments("longhorn", config=TINY | {"vocab_size": 10}), tokenizer)


def test_ngrams_against_counting():
    import numpy as np

    train, held_out = np.array([0, 1, 0, 1, 2]), np.array([0, 1, 2])
    p = np.array([3, 3, 2]) / 8
    assert unigram_loss(train, held_out, 3) == pytest.approx(-np.log(p[held_out]).mean())
    weight = [2 / 3, 2 / 3]  # both contexts were seen twice; a strength of 1 is best here
    by_pair = [1.0, 0.5]
    expected = -np.mean([np.log(w * b + (1 - w) * a) for w, b, a in zip(weight, by_pair, p[held_out[1:]])])
    assert bigram_loss(train, held_out, 3) == pytest.approx(expected, rel=1e-6)


def test_standard_text_is_split_by_name():
    train, held_out = standard_documents()
    assert len(train) > 5 * len(held_out) > 50
    assert set(train["text"]).isdisjoint(held_out["text"])


def test_a_model_that_goes_on_keeps_its_tokenizer(texts, tmp_path):
    """A new one would give its old weights other tokens."""
    pretrain(*settings(texts, tmp_path / "first", max_steps=1))
    before = (tmp_path / "first/tokenizer.json").read_text()
    data = DataArguments([f"{texts}/held_out.jsonl"], sequence_length=32, tokenizer_vocab_size=300)
    _, _, training = settings(texts, tmp_path / "second", max_steps=1)
    figures = pretrain(ModelArguments(model_name_or_path=str(tmp_path / "first")), data, training)
    assert (tmp_path / "second/tokenizer.json").read_text() == before
    (tmp_path / "first/tokenizer.json").unlink()
    (tmp_path / "first/tokenizer_config.json").unlink()
    _, _, training = settings(texts, tmp_path / "third", max_steps=1)
    with pytest.raises(ValueError, match=r"holds no tokenizer\. Give tokenizer=FOLDER"):
        pretrain(ModelArguments(model_name_or_path=str(tmp_path / "first")), data, training)
    assert figures["steps"] == 1
