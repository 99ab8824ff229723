"""What the help of every command looks like: one form, whoever wrote it."""

import argparse
import ast
import importlib
import re

import pytest

from hf_hybrid_ssm import cli
from hf_hybrid_ssm.cli import COMMANDS, TASKS, main
from hf_hybrid_ssm.cli.recipe import recipe_names, recipes_folder

FORM = re.compile(r"[a-z`(]|CONFIG|FAMILY|[A-Z]+/")  # a phrase, which a default may follow


def parser_of(command):
    return importlib.import_module(f"hf_hybrid_ssm.cli.{command}").build_parser() if command else cli.build_parser()


def defects_of(action):
    """What is wrong with the help of one argument."""
    shown = (action.help or "") % (vars(action) | {"prog": ""})
    if not shown:
        return ["no help"]
    found = []
    if shown.endswith(".") or not FORM.match(shown):
        found.append(f"{shown!r} is no phrase without a full stop")
    if re.match(r"(of|in|on|as|by|to|at|with|below) ", shown):
        found.append(f"{shown!r} begins in the middle")
    if "default" in shown and not re.search(r" \(default: [^()]+\)$", shown):
        found.append(f"{shown!r} has its default elsewhere than at the end")
    takes_a_number = action.default is not None and action.nargs != 0 and action.option_strings
    if takes_a_number and action.default not in ([], argparse.SUPPRESS) and "(default: " not in shown:
        found.append(f"{shown!r} does not say the default, {action.default!r}")
    if action.nargs != 0 and not action.choices:
        name = action.metavar or ""
        if not re.fullmatch(r"[A-Z_]+|[A-Z_]+/[A-Z]+|(config\.)?[A-Z]+=[A-Z]+", name):
            found.append(f"{shown!r} has no name in capitals for its value, but {name!r}")
    return found


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_argument_has_help_of_one_form(command):
    actions = [each for each in parser_of(command)._actions if each.dest != "help"]
    assert actions
    defects = {"/".join(each.option_strings) or each.dest: defects_of(each) for each in actions}
    assert {name: found for name, found in defects.items() if found} == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_in_one_sentence_what_it_does_and_ends_with_examples(command):
    parser = parser_of(command)
    first = parser.description.partition("\n\n")[0]
    assert re.match(r"[A-Z][a-z]+ ", first) and first.endswith(".") and first.count(". ") == 0, first
    assert parser.prog == f"hf-hybrid-ssm {command}"
    examples = parser.epilog.removeprefix("examples:\n").replace("\\\n", " ").splitlines()
    assert parser.epilog.startswith("examples:\n") and examples
    own = [line for line in examples if re.match(rf"    hf-hybrid-ssm {command}\b", line)]
    assert own and all(re.match(r"    (hf-hybrid-ssm|accelerate|torchrun) ", line) for line in examples), examples
    assert max(map(len, parser.format_help().splitlines())) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_options_that_commands_share_are_the_same(command):
    """`--json`, `--device` and the like read alike wherever they are."""
    known = {"--json": "add_json", "--device": "add_device", "--teacher": "add_teacher"}
    from hf_hybrid_ssm.cli import parsing

    for action in parser_of(command)._actions:
        for option in set(action.option_strings) & known.keys():
            shared = argparse.ArgumentParser()
            getattr(parsing, known[option])(shared)
            assert (action.help, action.metavar) == (shared._actions[-1].help, shared._actions[-1].metavar)


def test_the_list_of_commands_is_by_task_and_begins_with_where_to_start(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert next(iter(TASKS)) == "start here" and sum(map(len, TASKS.values())) == len(COMMANDS)
    places = [shown.index(f"\n{task}:\n") for task in TASKS]
    assert places == sorted(places)
    for task, commands in TASKS.items():
        for name, summary in commands.items():
            assert shown.index(f"\n{task}:\n") < shown.index(f"\n  {name} ")
            assert re.match(r"[a-z]+,? ", summary) and not summary.endswith(".")
    assert max(map(len, shown.splitlines())) <= 90


def test_recipes_are_short_unless_more_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for options in ((), ("--all",), ("--all", "--long")):
        assert main(["recipes", *options]) == 0
        shown[options] = capsys.readouterr().out
    short = shown[()].splitlines()
    assert len(short) < len(recipe_names()) + 6 and max(map(len, short)) <= 80 and " ...\n" not in shown[()]
    assert "longhorn/books_cpu" not in shown[()] and "--all" in shown[()]
    assert "  longhorn/books_cpu " in shown[("--all",)] and max(map(len, shown[("--all",)].splitlines())) <= 110
    assert " ...\n" in shown[("--all",)] and len(shown[("--all", "--long")]) > len(shown[("--all",)])


@pytest.mark.parametrize("name", recipe_names())
def test_the_first_line_of_a_recipe_fits_on_one_of_a_terminal(name):
    doc = ast.get_docstring(ast.parse((recipes_folder() / f"{name}.py").read_text(encoding="utf-8")))
    first, _, rest = doc.partition("\n")
    room = 80 - 4 - max(map(len, recipe_names()))
    assert re.match(r"[A-Z][\w-]+,? ", first) and first.endswith(".") and len(first) <= room, first
    assert not rest or rest.startswith("\n")
