"""Cards say what is in the files: metadata the Hub reads, exact parameters, figures from results alone."""

import ast
import html
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from _lib.documents import train_tokenizer
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaConfig

from hf_hybrid_ssm import LonghornConfig, SpadeConfig
from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.hub import card_of_folder, model_card
from hf_hybrid_ssm.hub.configurations import new_config
from hf_hybrid_ssm.serving.state_layout import growing_layers
from hf_hybrid_ssm.students.initial import student_config
from tests import processes
from tests.students.teachers import SIZES
from tests.tiny_models import OF_FAMILIES, build, config_of, language_model
from tools.model_cards import preset_cards

ROOT = Path(__file__).parents[2]


def test_committed_cards_are_those_of_the_presets():
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "model_cards").glob("*.md")}
    assert committed == preset_cards(), "run python -m tests.reporting cards"


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


# -- what others wrote ------------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[click](javascript:alert(1))", "![x](http://a/b.png)",
    "a | b | c", "`code`", "**bold**", "_slanted_", "# heading", "line\n\n## heading", "\\", "&lt;b&gt;", "$x^2$",
    "http://evil.example", "www.evil.example", "~~gone~~", "[ref]: http://x", "\x1b[31mred", "me@example.com",
)  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_folder_says_is_shown_as_it_is(text, folder):
    """Strings of results.json and config.json, as keys and as values: their letters, and nothing else, are shown."""
    results = {text: 1, "named": text, "several": [text], "teacher": text}
    (folder / "results.json").write_text(json.dumps(results))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {text: text, "hidden_note": text}))
    card = card_of_folder(folder).split("---", 2)[2]
    body = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(card.split("## Use")[0])
    shown = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    plain = html.unescape(re.sub(r"<[^>]*>", "", body))
    assert plain.count(shown) >= 4  # a key (where `_` is a space), three values, the base model, a field
    assert " ".join(sorted(set(re.findall(r"</?(\w+)", body)))) == "a code h1 h2 p table tbody td th thead tr"
    assert re.findall(r'href="([^"]*)"', body) == ["https://arxiv.org/abs/2407.14207"]
    assert body.count("<h2>") == 2 and body.count("<tr>") == 5
    bare = card.replace("https://arxiv.org", "")  # which GitHub and the Hub would make links
    assert not re.search(r"://|www\.\w|(?<!\\)@", bare.split("## Use")[0])


def test_a_name_cannot_leave_its_place(folder):
    """The folder's own name, in the heading and in the code."""
    strange = folder.rename(folder.with_name('x"); import os  # <b>`'))
    text = card_of_folder(strange)
    code = text.split("```python\n")[1].split("```")[0]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert [call.args[0].value for call in calls] == [strange.name] * 2
    assert "<b>" not in text.split("## Use")[0].split("---", 2)[2]


def test_a_licence_is_said_where_it_is_known(folder, capsys):
    """Of the weights: not because the code has one."""
    card = ModelCard(card_of_folder(folder))
    assert card.data.license is None and "Licence of the weights: unknown." in card.text
    (folder / "results.json").write_text(json.dumps({"teacher": "someone/teacher", "loss": 1.0}))
    card = ModelCard(card_of_folder(folder))
    assert card.data.license is None and card.data.base_model == "someone/teacher"
    assert "The weights come from someone/teacher, whose licence holds for them" in card.text
    (folder / "results.json").write_text(json.dumps({"teacher": "local-folder", "loss": 1.0}))
    card = ModelCard(card_of_folder(folder))
    assert card.data.base_model is None and "The weights come from local-folder" in card.text
    assert main(["card", str(folder), "--license", "mit", "--base-model", "a/b", "--overwrite"]) == 0
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.base_model) == ("mit", "a/b") and "Licence of the weights: mit." in card.text


@pytest.mark.parametrize("variant", OF_FAMILIES)
def test_a_state_of_one_size_is_told_only_of_such_models(variant):
    """Measured: the layers whose cache grows."""
    config = config_of(variant)
    told = "one size, however long" in model_card(config, name="model")
    assert not told or growing_layers(language_model(variant)) == []
    if config.model_type == "longhorn":
        assert told == (growing_layers(language_model(variant)) == [])


STATES = ("longhorn", "bst", "block_recurrent")


@pytest.mark.parametrize("variant", OF_FAMILIES)
def test_a_model_of_attention_alone_is_not_said_to_have_a_state(variant):
    config = config_of(variant)
    kinds = config.layer_types
    if config.model_type not in ("longhorn", "bst"):
        has_state = config.model_type == "lmu_isa" or bool(getattr(config, "ssm_layers", [0]))
    else:
        has_state = bool(set(kinds) & set(STATES))
    card = model_card(config, name="model", trained=True)
    assert has_state != ("it is attention alone" in card)
    assert has_state or "what its windows have left" in card or "what the others' windows have left" in card
    of_the_paper = ("## Citation", "state-space-model", "arxiv:", "https://arxiv.org/abs/")
    assert {mark in card for mark in of_the_paper} == {has_state}


def test_a_table_of_results_is_shown_once_and_only_as_a_table(folder):
    table = {"title": "Caches", "columns": ["model", "MiB"], "rows": [["student", "7"]]}
    results = {"teacher": "someone/teacher", "groups": [[1, 0], [2, 1]], "tables": [table], "runs": [{"loss": 1}]}
    (folder / "results.json").write_text(json.dumps(results))
    card = card_of_folder(folder)
    body = MarkdownIt("commonmark").enable("table").render(card.split("---", 2)[2])
    assert [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)[1:]] == [
        ["teacher", "someone/teacher"],
        ["groups", "[[1, 0], [2, 1]]"],
        [],
        ["student", "7"],
    ]
    assert "Nothing was trained; the weights come from someone/teacher." in card
    assert "Its other limits are those of its teacher, someone/teacher." in card and "helpful" not in card
    (folder / "results.json").write_text(json.dumps(results | {"steps": 3}))
    assert "Nothing was trained" not in card_of_folder(folder)


@pytest.mark.parametrize(("kept", "sentence"), [(1, "Only the layers with full attention"), (0, "The model forgets")])
def test_the_card_of_windows_says_what_they_forget(kept, sentence):
    kinds = ["full_attention"] * kept + ["window_attention"] * 2
    card = model_card(LonghornConfig(vocab_size=9, hidden_size=8, num_hidden_layers=len(kinds), layer_types=kinds,
                                     num_attention_heads=2, sliding_window=4), name="model")  # fmt: skip
    assert sentence in card and "fits the state" not in card and "it is attention alone" in card


TOKENIZERS = {"google-t5/t5-base": 32100, "openai-community/gpt2": 50257, "mistralai/Mistral-7B-v0.1": 32000}
COMMAND = re.compile(r"`python recipes/(\w+)\.py (recipes/configs/[\w./-]+\.yaml)`")
AUTOS = {"pretrain_seq2seq": AutoModelForSeq2SeqLM, "pretrain_mlm": AutoModelForMaskedLM}
CARDS = [path for folder in ("model_cards", "checkpoints/*") for path in ROOT.glob(f"{folder}/*.md")]
WITH_COMMAND = [path for path in CARDS if COMMAND.search(path.read_text(encoding="utf-8")) and path.parent != ROOT]


@pytest.mark.parametrize("path", WITH_COMMAND, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_card_describes_what_its_command_builds(path):
    """Its numbers are those of the model that the recipe makes, for its tokenizer."""
    text = path.read_text(encoding="utf-8")
    script, file = COMMAND.search(text).groups()
    settings = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    fields = settings.get("config") or {}
    if settings.get("tokenizer") in TOKENIZERS:
        fields = {"vocab_size": TOKENIZERS[settings["tokenizer"]]} | fields
    elif (path.parent / "tokenizer.json").is_file():  # the recipe has trained it
        fields = {"vocab_size": len(AutoTokenizer.from_pretrained(path.parent))} | fields
    config = new_config(settings["model_type"], settings.get("preset"), **fields)
    with torch.device("meta"):
        model = AUTOS.get(script, AutoModelForCausalLM).from_config(config)
    total = model.num_parameters()
    if path.stem == "lmu-isa":  # a table of sizes, of which the command trains one
        assert f"| {settings['preset']} | {total:,} |" in text
    elif config.model_type == "llama":
        assert f"| parameters | {total:.4g} |" in text
    else:
        assert f"{total:,} parameters" in text and f"`{type(model).__name__}`" in text


def test_there_are_cards_with_commands():
    assert len(WITH_COMMAND) >= 12


# what is given to a student of a Llama of four layers → words of its card
STUDENTS = {
    "windows and full layers": ({"keep": [1]}, ["A transformer of windows and full layers: a `llama` model",
        "In 3 of 4 layers a token sees the 9 tokens before its own; a key and a value of the layer's own stand",
        "Layer 0: window attention; layer 1: full attention; layers 2 to 3: window attention.",
        "Only the layers with full attention see"]),
    "windows": ({"sink": "first_token"}, ["A transformer of windows: a `llama` model",
        "the first token's key and value stay in the cache", "The model forgets what its windows have left."]),
    "groups": ({"keep": [(1, 0)]}, ["A transformer of windows and full layers", "but for some heads, which see all",
        "layer 1: full attention in some heads, window attention in the others", "Only the heads with full"]),
    "all kept": ({"keep": [0, 1, 2, 3]}, ["A transformer of full layers: a `llama` model in the classes of"]),
    "memory": ({"keep": [1], "memory": "longhorn"}, ["A hybrid of attention and the memory of Longhorn",
        "Layer 0: window attention, Longhorn beside it; layer 1: full attention", "online associative recall"]),
    "memory instead": ({"memory": "longhorn", "instead": True}, ["A hybrid", "Layers 0 to 3: Longhorn."]),
    "contexts": ({"memory": "context", "sink": None}, ["A hybrid of attention and the memory of Block-State",
        "window attention, context states beside it"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", STUDENTS)
def test_the_card_of_a_student_tells_its_plan(kind):
    """Windows and full layers where nothing is a state-space layer, a hybrid where something is."""
    given, words = STUDENTS[kind]
    config = student_config(LlamaConfig(**SIZES), **{"window": 9} | given)
    card = model_card(config, name="model", trained=True, base_model="owner/teacher")
    assert not [part for part in words if part not in card], card
    is_hybrid = any(layer.memory for layer in config.plan.layers)
    of_the_paper = ("## Citation", "state-space-model", "arxiv:", "https://arxiv.org/abs/", "hybrid of attention")
    if kind != "memory instead":
        assert {mark in card for mark in of_the_paper} == {is_hybrid}
    assert "hybrid_student" in card.split("---")[1] and "`HybridStudentForCausalLM`" in card
