"""A trained run becomes a folder to share: measured with the noise it was trained with, and complete."""

import json

import pretrain_mlm
import pretrain_seq2seq
import pytest
from _lib.documents import DataArguments
from _lib.entry import parsed
from publish_checkpoint import PublishArguments, objective_of, publish

from hf_hybrid_ssm.hub import check_folder
from tests.recipes import small

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY |= {"sliding_window": 5}
PROMPT = "word 1 of 2 word 3 of 4 word 5 of 6 word 7 of 8"


@pytest.mark.parametrize("kind", ["masked", "spans"])
def test_an_encoder_and_an_encoder_decoder(kind, tmp_path):
    texts = small.numbered_texts(tmp_path)
    data = DataArguments([texts], sequence_length=32, tokenizer_vocab_size=300)
    training = small.training(tmp_path / "run", logging_steps=1, max_steps=2)
    if kind == "masked":
        pretrain_mlm.pretrain(pretrain_mlm.MaskingArguments("spade", config=TINY), data, training)
    else:
        config = TINY | {"num_decoder_layers": 1, "max_target_positions": 48}
        arguments = pretrain_seq2seq.SpanArguments("spade_seq2seq", config=config, noise_density=0.5)
        pretrain_seq2seq.pretrain(arguments, data, training)

    found = {}
    for noise in (0.15, 0.5):
        folder = tmp_path / f"shared-{noise}"
        given = {"held_out": [f"words={texts}"], "prompt": PROMPT, "max_tokens": 400, "length": 32, "noise": noise}
        given["with_code"] = noise == 0.5
        found[noise] = publish(PublishArguments(str(tmp_path / "run"), str(folder), "some.yaml", **given))
        contents = check_folder(folder)
        assert contents["bytes"] > 0 and (contents["code"] > 0) == given["with_code"]
        assert objective_of(folder, noise).noise == noise
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert f"{found[noise]['words_perplexity']:.4g}" in card and "What it restores" in card
        assert ("trust_remote_code" in card) == given["with_code"]
        known = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
        assert known["prompt"].count("<") >= 1 and known["greedy"]
    assert found[0.15]["words_loss"] != found[0.5]["words_loss"]
    assert ("validation_loss_with_other_inputs" in found[0.5]) == (kind == "spans")


def test_the_command_line_of_several_texts(monkeypatch):
    words = ["run=a", "folder=b", "--config", "c.yaml", "--held_out", "novels=A.jsonl", "tales=B.jsonl", "length=64"]
    monkeypatch.setattr("sys.argv", ["publish_checkpoint.py", *words])
    found = parsed(PublishArguments)
    assert (found.run, found.folder, found.held_out) == ("a", "b", ["novels=A.jsonl", "tales=B.jsonl"])
    assert (found.config, found.length) == ("c.yaml", 64)
