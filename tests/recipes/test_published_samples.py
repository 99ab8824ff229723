"""The text that a card shows is what the lines below it write."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
import torch
from publish_checkpoint import sample_section
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_hybrid_ssm  # noqa: F401 - registers the families

ROOT = Path(__file__).parents[2] / "checkpoints"
CARDS = {path.parent: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*/README.md"))}
WRITERS = [folder for folder, card in CARDS.items() if "## What it writes" in card]
named = pytest.mark.parametrize("folder", WRITERS, ids=lambda folder: folder.name)


@named
def test_the_lines_of_a_card_write_its_text(folder):
    section = CARDS[folder].partition("## What it writes")[2]
    shown = re.search(r"^> (.*)$", section, re.MULTILINE)[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    tokenizer = AutoTokenizer.from_pretrained(folder, config=AutoConfig.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.inference_mode():
        exec(code, {"model": model, "tokenizer": tokenizer})  # as a reader would
    assert printed.getvalue().removesuffix("\n").replace("\n", " ") == shown


@named
def test_a_card_is_what_the_recipe_writes(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, config=AutoConfig.from_pretrained(folder))
    known = json.loads((folder / "golden.json").read_text(encoding="utf-8"))
    assert known["input_ids"][0] == tokenizer.bos_token_id  # which the tokenizer itself does not add:
    assert tokenizer(known["prompt"])["input_ids"] == known["input_ids"][1:]
    assert CARDS[folder].endswith(sample_section(folder, known, tokenizer))
