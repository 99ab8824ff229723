"""The committed checkpoints keep loading, and keep saying the same: a change of format that breaks them fails here."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from hf_hybrid_ssm.hub import check_folder

ROOT = Path(__file__).parents[2] / "checkpoints"
FOLDERS = sorted(path.parent for path in ROOT.glob("*/config.json"))
MAX_BYTES = 12_000_000  # of one file of weights
MAX_BYTES_TOGETHER = 60_000_000

named = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def golden_of(folder: Path) -> dict:
    return json.loads((folder / "golden.json").read_text(encoding="utf-8"))


def test_there_are_checkpoints_and_they_are_small():
    sizes = [(folder / "model.safetensors").stat().st_size for folder in FOLDERS]
    assert sizes and max(sizes) <= MAX_BYTES and sum(sizes) <= MAX_BYTES_TOGETHER


@named
def test_every_file_is_the_one_that_was_published(folder):
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {path.name for path in folder.iterdir() if path.is_file()} - {"SHA256SUMS"}
    assert found == set(sums)
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert check_folder(folder)["bytes"] > 0


def loaded(folder: Path):
    """The checkpoint in float32, its tokenizer, and what its objective is."""
    config = AutoConfig.from_pretrained(folder)
    heads = {"CausalLM": AutoModelForCausalLM, "MaskedLM": AutoModelForMaskedLM}
    objective = config.architectures[0].partition("For")[2]
    auto_class = heads.get(objective, AutoModelForSeq2SeqLM)
    tokenizer = AutoTokenizer.from_pretrained(folder, config=config)
    return auto_class.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer, objective


@named
def test_logits_and_greedy_text_are_golden(folder):
    known = golden_of(folder)
    model, tokenizer, objective = loaded(folder)
    ids = torch.tensor([known["input_ids"]])
    assert tokenizer.decode(ids[0, 1:] if objective == "CausalLM" else ids[0]) == known["prompt"]
    attention = {"attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        if objective == "MaskedLM":
            logits = model(ids).logits[ids == tokenizer.mask_token_id][0]
        elif objective == "CausalLM":
            logits = model(ids).logits[0, -1]
        else:
            start = torch.tensor([[model.config.decoder_start_token_id]])
            logits = model(ids, decoder_input_ids=start).logits[0, -1]
    torch.testing.assert_close(logits[::64], torch.tensor(known["every_64th_logit"]), atol=1e-3, rtol=1e-3)
    if objective == "MaskedLM":
        text = tokenizer.decode([logits.argmax()])
    elif objective == "CausalLM":
        text = tokenizer.decode(model.generate(ids, **attention, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :])
    else:
        text = tokenizer.decode(model.generate(ids, **attention, max_new_tokens=24, do_sample=False)[0])
    assert text == known["greedy"]


@named
def test_language_models_can_be_chatted_with(folder):
    """`transformers serve` and pipelines with messages need a template."""
    _, tokenizer, objective = loaded(folder)
    if objective == "CausalLM":
        messages = [{"role": "user", "content": "It was late."}, {"role": "assistant", "content": "Yes."}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "It was late.\n\nYes.\n\n"


@named
def test_the_card_quotes_what_was_measured(folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for name in ("novels_perplexity", "tales_perplexity", "textbooks_perplexity", "books_perplexity"):
        assert f"{results[name]:.4g}" in card
    pictures = {"loss.png"} | ({"extrapolation.png"} if "perplexity_by_length" in results else set())
    assert {path.name for path in folder.glob("*.png")} == pictures
    for picture in pictures:
        assert f"({picture})" in card and (folder / picture).stat().st_size > 1000


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign"])
def test_a_damaged_copy_is_refused_by_name(tmp_path, damage):
    copy = shutil.copytree(FOLDERS[0], tmp_path / "copy")
    weights = copy / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        (copy / "modeling_foreign.py").write_text("import os\n", encoding="utf-8")
    with pytest.raises(ValueError, match="modeling_foreign.py" if damage == "foreign" else "model.safetensors"):
        check_folder(copy)
