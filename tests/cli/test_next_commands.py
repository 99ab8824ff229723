"""Every command that recipes and commands print after `Next:` is run as it is printed."""

import ast
import io
import json
import shlex
from dataclasses import dataclass

import pytest
from _lib import entry
from _lib.entry import start

from hf_hybrid_ssm.cli import main
from hf_hybrid_ssm.cli.recipe import recipe_names, recipes_folder
from tests.cli.folders import save_checkpoint
from tests.tiny_models import build
from tests.upcycle.teacher_files import save_teacher

MADE = {
    "finetune_summarization": ("encoder-decoder", None),
    "lra": ("spade s4 window", "SpadeForSequenceClassification"),
    "pretrain_clm": ("longhorn", None),
    "pretrain_mlm": ("bst s5 bidirectional", "BstForMaskedLM"),
    "pretrain_seq2seq": ("encoder-decoder", None),
    "word_lm": ("spade adaptive", "SpadeForCausalLM"),
}
"""What each recipe that says what comes next writes: a variant with a tokenizer, or a class."""


@dataclass
class Settings:
    output_dir: str


def words_of(recipe):
    """`then=(...)` in the source of a recipe; None where it has none."""
    calls = (node for node in ast.walk(ast.parse((recipes_folder() / f"{recipe}.py").read_text(encoding="utf-8"))))
    keywords = (keyword for call in calls if isinstance(call, ast.Call) for keyword in call.keywords)
    return next((ast.literal_eval(keyword.value) for keyword in keywords if keyword.arg == "then"), None)


def words_after_next(said):
    """The words after the program's name, as a shell takes them apart."""
    program, *words = shlex.split(said.rsplit("Next:\n  ", 1)[1])
    assert program == "hf-hybrid-ssm"
    return words


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if words_of(name) is not None])
def test_after_a_recipe(recipe, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "the model's folder"
    variant, class_name = MADE[recipe]
    if class_name is None:
        save_checkpoint(folder, variant)
    else:
        build(variant, class_name).save_pretrained(folder)
    monkeypatch.setattr("sys.argv", [recipe, f"output_dir={json.dumps(str(folder))}"])
    monkeypatch.setattr(entry, "_training", [False])
    start(recipe, lambda settings: None, Settings, then=words_of(recipe))
    words = words_after_next(capsys.readouterr().out)
    assert str(folder) in words and main(words) == 0


def test_after_export_and_card(copy, capsys):
    """One leads to the other, and that to the check of what will be shared."""
    words = ["export", str(copy)]
    for following in ("card", "check"):
        assert main(words) == 0
        words = words_after_next(capsys.readouterr().out)
        assert words[0] == following
    assert main(words) == 0 and "values" in capsys.readouterr().out
    assert main(["export", str(copy)]) == 0  # the card is there
    assert words_after_next(capsys.readouterr().out) == words


@pytest.mark.parametrize("options", [[], ["--delta"]], ids=str)
@pytest.mark.parametrize("template", [True, False])
def test_after_upcycle(options, template, tmp_path, monkeypatch, capsys):
    teacher = save_teacher(tmp_path / "teacher")
    if not template:
        (teacher / "chat_template.jinja").unlink()
    given = ["--keep", "1", "--keep-by", "even", "--window", "16", "--recall-texts", "0", "--device", "cpu"]
    assert main(["upcycle", str(teacher), str(tmp_path / "out"), *given, *options]) == 0
    words = words_after_next(capsys.readouterr().err)
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n"))  # of a chat
    assert words[0] == ("chat" if template else "generate") and main(words) == 0
