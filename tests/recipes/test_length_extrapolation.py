"""Perplexity by length: every length scores the same tokens, and one call trains, scores and draws."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from length_extrapolation import ExtrapolationArguments, length_extrapolation, load, loss_at, rows_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_hybrid_ssm  # noqa: F401 - registers the families
from tests.recipes.small import QUIET, write_lines

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "state_size": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    lines = [" ".join(f"word {number} of text {text}" for number in range(60)) for text in range(6)]
    return [write_lines(folder / "texts.jsonl", [{"text": line} for line in lines])]


def arguments(files, folder, **options):
    base = QUIET | {"train_files": files, "tokenizer_vocab_size": 280, "max_steps": 2}
    llama = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    variants = {
        "Longhorn": {"model_type": "longhorn", "config": TINY},
        "Llama": {"model_type": "llama", "config": llama},
    }
    options = {"base": base, "variants": variants, "seeds": [0, 1], "lengths": [16, 32, 64]} | options
    options |= {"train_length": 16, "scored_tokens": 256, "output_dir": str(folder / "runs")}
    return ExtrapolationArguments(files, **options)


def test_trains_and_scores(files, tmp_path):
    first = arguments(files, tmp_path, results=str(tmp_path / "figures"))
    figures = length_extrapolation(first)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written | figures == written
    assert (tmp_path / "figures.png").stat().st_size > 1000
    for found in figures["models"].values():
        assert [point["length"] for point in found["points"]] == [16, 32, 64]
        assert found["checkpoints"] == 2 and found["scored_tokens"] == 240
        assert all(100 < point["perplexity"] < 400 for point in found["points"])
    trained = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/model.safetensors")}
    assert len(trained) == 4 and length_extrapolation(first) == figures  # what is there is not trained again
    assert all(path.stat().st_mtime_ns == time for path, time in trained.items())
    with pytest.raises(FileExistsError, match="overwrite"):
        length_extrapolation(replace(first, train_length=32))

    checkpoint = str(tmp_path / "runs/Llama-1")
    trained = arguments(files, tmp_path / "again", models={"Llama": [checkpoint]}, variants={})
    rows = rows_of(trained, AutoTokenizer.from_pretrained(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    assert rows.shape == (4, 64)
    runs = figures["models"]["Llama"]["points"]
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/Llama-0").eval()
    for point in runs:
        mean = (loss_at(model, rows, point["length"], 16) + loss_at(other, rows, point["length"], 16)) / 2
        assert point["loss"] == pytest.approx(mean, rel=1e-6)


def test_every_length_scores_the_same_tokens():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longhorn", vocab_size=50, **TINY)).eval()
    rows = torch.randint(0, 50, (2, 24))
    with torch.inference_mode():
        losses = F.cross_entropy(model(rows).logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    scored = [position for position in range(1, 24) if position % 6]
    expected = losses[:, [position - 1 for position in scored]].mean().item()
    assert loss_at(model, rows, 24, 6) == pytest.approx(expected, rel=1e-5)
    with torch.inference_mode():
        windows = rows.view(-1, 6)
        short = F.cross_entropy(model(windows).logits[:, :-1].transpose(1, 2), windows[:, 1:])
    assert loss_at(model, rows, 6, 6) == pytest.approx(short.item(), rel=1e-5)


def test_weights_are_read_with_another_configuration(files, tmp_path):
    """A Llama read as a Mistral sees no further than its window; scaled positions change only what lies beyond."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "initializer_range": 0.5}  # attention that matters
    config = AutoConfig.for_model("llama", max_position_embeddings=64, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    plain = load(str(tmp_path / "llama"), {}).eval()
    tokens = torch.randint(0, 300, (1, 48))
    with torch.no_grad():
        wanted = plain(tokens).logits
        windows = load(str(tmp_path / "llama"), {"model_type": "mistral", "sliding_window": 16}).eval()
        found = windows(tokens).logits
        torch.testing.assert_close(found[:, :16], wanted[:, :16])
        assert windows.config.model_type == "mistral" and (found[:, 20:] - wanted[:, 20:]).abs().max() > 1e-3
        dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0}
        scaled = load(str(tmp_path / "llama"), {"max_position_embeddings": 16, "rope_parameters": dynamic}).eval()
        torch.testing.assert_close(scaled(tokens[:, :16]).logits, wanted[:, :16])
        assert (scaled(tokens).logits - wanted).abs().max() > 1e-3
    with pytest.raises(ValueError, match="read_as"):
        load(str(tmp_path / "llama"), {"model_type": "qwen2"})
    with pytest.raises(ValueError, match="read_as"):
        ExtrapolationArguments(files, models={"Llama": [str(tmp_path / "llama")]}, read_as={"llama": {}})
