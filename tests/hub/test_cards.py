"""Cards say what is in the files: metadata the Hub reads, exact parameters, figures from results alone."""

import json
import os
import sys
from pathlib import Path

import pytest
from _lib.documents import train_tokenizer
from huggingface_hub import ModelCard
from transformers import LlamaConfig

from hf_hybrid_ssm import LonghornConfig, SpadeConfig
from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub import card_of_folder, model_card
from tests import processes
from tests.tiny_models import build, config_of
from tools.model_cards import preset_cards

ROOT = Path(__file__).parents[2]


def test_committed_cards_are_those_of_the_presets():
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").glob("*.md")}
    assert committed == preset_cards(), "run make cards"


def test_no_card_is_of_a_task_or_of_a_size_that_no_paper_has():
    """The sizes of LMU-ISA, a ladder of twelve, share a card."""
    names = {path.stem for path in (ROOT / "model_cards").glob("*.md")}
    assert {"longhorn-1.3b", "bst-200m", "lmu-isa", "spade-lm-wt103", "spade-base++"} < names
    assert not [name for name in names if "lra" in name or "rule" in name or "deep" in name or "slide" in name]


def test_metadata_and_parameters():
    card = ModelCard(model_card(LonghornConfig.preset("125m"), name="longhorn-125m"))
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0" and "arxiv:2407.14207" in card.data.tags
    assert "128,563,968 parameters" in card.text and "No trained weights are published yet." in card.text
    assert "from_pretrained" not in card.text  # nothing to load


def test_adaptive_embeddings_are_embeddings():
    """267,735 words in three bands of widths d, d / 4 and d / 16, each with its projection."""
    config = SpadeConfig.preset("spade-lm-wt103")
    d, ends = config.hidden_size, [*config.adaptive_cutoffs, config.vocab_size]
    widths = [d // config.adaptive_factor**band for band in range(len(ends))]
    embeddings = sum((end - start + d) * width for start, end, width in zip([0, *ends], ends, widths))
    total, inner = 249_234_688, 249_234_432 - embeddings
    assert f"{total:,} parameters, {inner:,} of them non-embedding" in model_card(config, name="spade-lm-wt103")


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("bst mh s4", "layer 1: window attention"),
        ("bst block-recurrent", "Layer 0: block-recurrent attention"),
        ("lmu-isa + global attention", "Layers 0 to 1: global attention, Legendre memory, implicit attention."),
        ("longhorn + window and full attention", "layer 2: full attention"),
        ("spade s4 window", "Layer 0: window attention and s4"),
        ("encoder-decoder", "`SpadeForConditionalGeneration`"),
    ],
)
def test_layers_are_told(variant, expected):
    assert expected in model_card(config_of(variant), name="model")


@pytest.fixture
def folder(tmp_path):
    model = build("longhorn", "LonghornForCausalLM")
    model.save_pretrained(tmp_path / "small-longhorn", export_code=True)
    train_tokenizer(["one two three apple"] * 4, 300).save_pretrained(tmp_path / "small-longhorn")
    results = {"validation_loss": 1.25, "validation_perplexity": 3.4903, "steps": 12}
    (tmp_path / "small-longhorn/results.json").write_text(json.dumps(results))
    return tmp_path / "small-longhorn"


def test_card_of_a_trained_model(folder):
    options = ["--dataset", "two old books", "--recipe", "python recipes/demo.py"]
    assert main(["card", str(folder), *options]) == 0
    card = ModelCard.load(folder / "README.md")
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured == {"loss": 1.25, "perplexity": 3.4903}
    assert {result.dataset_name for result in card.data.eval_results} == {"two old books"}
    assert "| validation loss | 1.25 |" in card.text and "| steps | 12 |" in card.text
    assert "Command: `python recipes/demo.py`." in card.text
    assert 'AutoModelForCausalLM.from_pretrained("small-longhorn", trust_remote_code=True)' in card.text


@pytest.mark.parametrize("exported", [True, False])
def test_the_code_of_a_card_runs_and_asks_nothing(folder, exported):
    if not exported:
        build("longhorn", "LonghornForCausalLM").save_pretrained(folder, export_code=False)
        for path in folder.glob("*.py"):
            path.unlink()
    text = card_of_folder(folder)
    code = text.split("```python\n")[1].split("```")[0]
    assert ("import hf_hybrid_ssm" not in code) == exported
    start = "import sys, builtins\nbuiltins.input = lambda text: print('ASKED', text) or 'n'\n"
    blocked = "sys.modules['hf_hybrid_ssm'] = None\n" if exported else ""
    end = "tokenizer.save_pretrained('tokenizer')\nAutoTokenizer.from_pretrained('tokenizer')\n"
    environment = os.environ | {"HF_MODULES_CACHE": str(folder.parent / "modules")}
    ran = processes.run([sys.executable, "-c", start + blocked + code + end], cwd=folder.parent, env=environment)
    assert ran.returncode == 0 and "ASKED" not in ran.stdout, ran.stdout + ran.stderr
    assert not list((folder.parent / "tokenizer").glob("*.py"))


def test_a_trained_folder_without_figures(folder):
    (folder / "results.json").unlink()
    text = card_of_folder(folder)
    assert "No trained weights" not in text and "The folder holds no record of the training." in text
    assert str(folder.parent) not in text and "_name_or_path" not in text


def test_no_index_is_said_to_have_the_package(folder):
    committed = [path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").glob("*.md")]
    assert not [card for card in [card_of_folder(folder), *committed] if "pip install" in card]


def test_bad_input(folder, tmp_path):
    with pytest.raises(ValueError, match="model_type='llama'"):
        model_card(LlamaConfig(), name="llama")
    with pytest.raises(ValueError, match="class_name='BstModel'"):
        model_card(LonghornConfig(), name="longhorn", class_name="BstModel")
    with pytest.raises(ValueError, match=r"no config\.json"):
        card_of_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        card_of_folder(folder)
