"""The committed checkpoints keep loading, and keep saying the same: a change of format that breaks them fails here."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import publish_checkpoint
import pytest
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hf_hybrid_ssm.hub import check_folder, export_code
from hf_hybrid_ssm.hub.sources import PACKAGE
from tests import processes
from tests.checkpoints import golden
from tests.checkpoints.golden import check_golden, loaded

ROOT = Path(__file__).parents[2] / "checkpoints"
FOLDERS = sorted(path.parent for path in ROOT.glob("*/config.json"))
DELTAS = sorted(path.parent for path in ROOT.glob("deltas/*/delta.json"))
MAX_BYTES = 12_000_000  # of one file of weights
MAX_BYTES_TOGETHER = 60_000_000
MAX_BYTES_OF_DELTAS = 16_000_000

named = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_there_are_checkpoints_and_they_are_small():
    sizes = [(folder / "model.safetensors").stat().st_size for folder in FOLDERS]
    assert sizes and max(sizes) <= MAX_BYTES and sum(sizes) <= MAX_BYTES_TOGETHER
    of_deltas = [path.stat().st_size for folder in DELTAS for path in folder.iterdir()]
    assert of_deltas and sum(of_deltas) <= MAX_BYTES_OF_DELTAS


@pytest.mark.parametrize("folder", [*FOLDERS, *DELTAS], ids=lambda folder: folder.name)
def test_every_file_is_the_one_that_was_published(folder):
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {path.name for path in folder.iterdir() if path.is_file()} - {"SHA256SUMS"}
    assert found == set(sums) and not list(folder.glob("*.py"))  # code would be a copy of src: export_code adds it
    for name, digest in sums.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert check_folder(folder)["bytes"] > 0


@named
def test_logits_and_greedy_text_are_golden(folder):
    check_golden(folder)


def test_exported_they_say_the_same_where_the_package_is_missing(tmp_path):
    ours = [folder for folder in FOLDERS if folder.name != "llama-books"]
    copies = [export_code(shutil.copytree(folder, tmp_path / folder.name)) for folder in ours]
    paths = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not (Path(path) / PACKAGE).exists()
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    ran = processes.run([sys.executable, golden.__file__, *copies], env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


@named
def test_language_models_can_be_chatted_with(folder):
    """`transformers serve` and pipelines with messages need a template."""
    _, tokenizer, objective = loaded(folder)
    if objective == "CausalLM":
        messages = [{"role": "user", "content": "It was late."}, {"role": "assistant", "content": "Yes."}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "It was late.\n\nYes.\n\n"
        masked = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        trained = [token for token, one in zip(masked["input_ids"], masked["assistant_masks"], strict=True) if one]
        assert tokenizer.decode(trained) == "Yes."
        assert tokenizer.chat_template == publish_checkpoint.CHAT_TEMPLATE


@named
def test_tokenizers_leave_the_length_unset(folder):
    """A number that transformers does not know as unset is one to pad to, however large."""
    _, tokenizer, _ = loaded(folder)
    assert tokenizer.model_max_length == VERY_LARGE_INTEGER  # before padding by it
    rows = tokenizer(["one", "It was late"], padding="max_length", truncation=True)["input_ids"]
    assert max(map(len, rows)) < 10


@named
def test_the_encoder_decoders_tokenizer_alone_ends_a_text(folder):
    """Labels as everyone makes them have the end that the model was trained with, and generation stops there."""
    _, tokenizer, objective = loaded(folder)
    ends = [tokenizer.eos_token_id] if objective == "ConditionalGeneration" else []
    words, more = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("It was late", "Yes"))
    for found in (tokenizer("It was late"), tokenizer(text_target="It was late")):
        assert found["input_ids"] == [*words, *ends]
    assert tokenizer("It was late", "Yes")["input_ids"] == [*words, *ends, *more, *ends]
    assert tokenizer("It was late", truncation=True, max_length=2)["input_ids"] == [words[0], *(ends or words[1:2])]


OTHER_STACK = {"spade-encoder-books": AutoModelForCausalLM, "spade-books": AutoModelForMaskedLM}


@pytest.mark.parametrize("name", OTHER_STACK)
def test_a_model_of_another_stack_is_refused(name):
    """None of its layers would have weights; a new head on the layers of the checkpoint is no such thing."""
    with pytest.raises(ValueError, match=rf"{name}' holds a Spade\w+, and none of its layers are those of a Spade"):
        OTHER_STACK[name].from_pretrained(ROOT / name)
    model, report = AutoModelForSequenceClassification.from_pretrained(ROOT / name, output_loading_info=True)
    assert all("classifier" in key or "score" in key for key in report["missing_keys"])
    assert isinstance(AutoModelForSequenceClassification.from_pretrained(ROOT / name), type(model))


@named
def test_the_card_quotes_what_was_measured(folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "trust_remote_code" not in card
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for name in ("novels_perplexity", "tales_perplexity", "textbooks_perplexity", "books_perplexity"):
        assert f"{results[name]:.4g}" in card
    pictures = {"loss.png"} | ({"extrapolation.png"} if "perplexity_by_length" in results else set())
    assert {path.name for path in folder.glob("*.png")} == pictures
    for picture in pictures:
        assert f"({picture})" in card and (folder / picture).stat().st_size > 1000
