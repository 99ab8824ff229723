"""The recipes as commands, from a clone and from an installed package; what a missing package costs: one line."""

import json
import runpy
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from _lib import entry

from hf_hybrid_ssm.cli import main, recipe, run
from hf_hybrid_ssm.cli.recipe import config_names, recipe_names, settings_file
from hf_hybrid_ssm.cli.recipe_fields import setting_names
from tests.cli.folders import python

RECIPES = Path(__file__).parents[2] / "recipes"
SCRIPT = '''"""Prints what it is given.

More.
"""

import sys

print(sys.argv[1:])
'''


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The recipes inside of the package, as a wheel carries them."""
    package = tmp_path / "hf_hybrid_ssm"
    shutil.copytree(RECIPES / "configs", package / "recipes/configs")
    (package / "recipes/demo.py").write_text(SCRIPT)
    (package / "recipes/shout.py").write_text("import a_package_that_is_missing\n")
    (package / "cli").mkdir()
    monkeypatch.setattr(recipe, "__file__", str(package / "cli/recipe.py"))
    return package / "recipes"


def test_every_recipe_and_configuration_is_listed(capsys):
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["recipes"]) == {path.stem for path in RECIPES.glob("*.py")} and all(found["recipes"].values())
    files = {path.relative_to(RECIPES / "configs").as_posix() for path in RECIPES.glob("configs/**/*.yaml")}
    listed = {f"{name}.yaml" for name in found["configurations"]}
    assert files - listed == {name for name in files if name.startswith("accelerate/")} and listed <= files
    assert all(found["configurations"].values())
    assert main(["recipes", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "  pretrain_clm  " in shown and "  longhorn/books_cpu  " in shown


def test_it_runs_from_an_installed_package(installed, capsys):
    own = installed.parent / "own.yaml"
    own.touch()
    for given in ("longhorn/books_cpu", "longhorn/books_cpu.yaml", str(own)):
        assert main(["recipe", "demo", given, "a=1", "b.c=2"]) == 0
        path, *pairs = eval(capsys.readouterr().out)
        assert pairs == ["a=1", "b.c=2"] and Path(path).is_file() and Path(path).stem == Path(given).stem
    assert yaml.safe_load(Path(settings_file("longhorn/books_cpu")).read_text())["model_type"] == "longhorn"
    for rest in (["a=1"], ["--help"], []):
        assert main(["recipe", "demo", *rest]) == 0
        assert eval(capsys.readouterr().out) == rest
    assert recipe_names() == ["demo", "shout"] and len(config_names()) > 50


MEANT = {
    ("recipe", "pretrain_cl"): "there is no recipe 'pretrain_cl', did you mean 'pretrain_clm'?",
    ("recipe", "pretrain_cml"): "there is no recipe 'pretrain_cml', did you mean 'pretrain_clm'?",
    ("recipe", "pretrain_mml"): "there is no recipe 'pretrain_mml', did you mean 'pretrain_mlm'?",
    ("recipe", "pretrain"): "did you mean 'pretrain_clm' or 'pretrain_mlm' or 'pretrain_seq2seq'?",
    ("upcylce",): "there is no command 'upcylce', did you mean 'upcycle'?",
    ("generat",): "there is no command 'generat', did you mean 'generate'?",
    ("recip",): "there is no command 'recip', did you mean 'recipes' or 'recipe'?",
}
"""Letters in another order are the same name, and all that begin so are named."""


@pytest.mark.parametrize("given", MEANT)
def test_what_is_not_there_says_what_may_have_been_meant(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*given])
    assert capsys.readouterr().err.endswith(f"{MEANT[given]}\n")


@pytest.mark.parametrize("name", recipe_names())
def test_the_settings_of_a_recipe_are_read_from_its_source(name, monkeypatch):
    """They are those of the classes that it hands to `start`, which it need not be imported for."""
    handed = []
    monkeypatch.setattr(entry, "start", lambda recipe, run, *classes, then=None: handed.extend(classes))
    source = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
    found = setting_names(RECIPES / f"{name}.py")
    if "    start(" not in source or name == "sft":  # parsers of flags, and TRL's settings
        assert found is None
        return
    monkeypatch.setattr(sys, "path", [str(RECIPES), *sys.path])
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    wanted = {field.name for each in handed for field in fields(each) if field.init}
    assert wanted and found >= wanted
    assert not found & {"max_stepz", "learning_rates_"}


WRONG = [
    ["generate", "./nope", "a"],
    ["generate", "empty", "a"],
    ["generate", "empty", "a", "--top-p", "2"],
    ["chat", "empty"],
    ["read", "empty", "text", "--context", "context"],
    ["check", "empty", "--json"],
    ["export", "empty"],
    ["card", "empty"],
    ["convert", "spade", "nope", "out"],
    ["eval", "--model_args", "pretrained=./nope"],
    ["demo", "--output", "text"],
    ["recipe", "nope"],
    ["recipe", "pretrain_clm", "longhorn/books_cpu", "max_stepz=3"],
]


def test_wrong_arguments_are_said_before_torch_is_imported(tmp_path):
    """All in one process, which would have it after the first that imports it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").touch()
    code = f"""
import sys
from hf_hybrid_ssm.cli import main
for command in {WRONG!r}:
    try:
        status = main(command)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else print(end.code, file=sys.stderr) or 1
    print(command[0], status, sorted({{"torch", "transformers", "numpy"}} & sys.modules.keys()))
"""
    ran = python("-c", code, cwd=tmp_path)
    found = [line for line in ran.stdout.splitlines() if not line.startswith("{")]
    statuses = {"generate": "12", "recipe": "12"}
    assert len(found) == len(WRONG), ran.stderr
    for command, line in zip(WRONG, found):
        name, status, imported = line.split(" ", 2)
        assert name == command[0] and status in statuses.get(name, "1") and imported == "[]", line
    assert ran.stderr.count("has no config.json") == 5
    said = "pretrain_clm.py: unknown setting 'max_stepz', did you mean 'max_steps'? `hf-hybrid-ssm recipe pretrain_clm"
    assert ran.stderr.splitlines()[-1].startswith(said)


def test_serving_without_its_extra_says_what_to_type(monkeypatch):
    monkeypatch.setattr(run, "missing_requirements", lambda *extras, of: ["fastapi"])
    with pytest.raises(SystemExit, match=r"^`transformers serve` needs: pip install "):
        main(["run", "transformers", "serve"])


def test_a_package_that_is_missing_is_named_with_what_to_type(installed, monkeypatch):
    with pytest.raises(ModuleNotFoundError):  # no extra has it: a defect, with its traceback
        main(["recipe", "shout"])
    monkeypatch.setattr(recipe, "missing_modules", lambda *_: {"a_package_that_is_missing"})
    monkeypatch.setattr(recipe, "install_command", lambda *extras: f"pip install {extras}")
    with pytest.raises(SystemExit, match=r"a_package_that_is_missing is not installed; .*: pip install \('train',\)"):
        main(["recipe", "shout"])


def test_a_recipes_own_keys_and_refusals(capsys):
    for rest, status in ((["--help"], 0), ([], "usage")):
        with pytest.raises(SystemExit) as end:
            main(["recipe", "pretrain_clm", *rest])
        assert end.value.code == status or str(end.value.code).startswith("usage: python recipes/pretrain_clm.py")
    assert "sequence_length: int = 1024" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"pretrain_clm\.py: .*nope.* is neither a YAML file"):
        main(["recipe", "pretrain_clm", "nope"])
