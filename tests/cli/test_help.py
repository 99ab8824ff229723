"""What the help of every command looks like: one form, whoever wrote it."""

import argparse
import importlib
import re

import pytest

from hf_hybrid_ssm import cli
from hf_hybrid_ssm.cli import COMMANDS, TASKS, main
from hf_hybrid_ssm.cli.recipe import recipe_names


def parser_of(command):
    return importlib.import_module(f"hf_hybrid_ssm.cli.{command}").build_parser() if command else cli.build_parser()


def says_what_it_is(action):
    """In a phrase without a full stop, with the default at its end."""
    shown = (action.help or "") % (vars(action) | {"prog": ""})
    has_default = action.default not in (None, [], argparse.SUPPRESS) and action.nargs != 0 and action.option_strings
    return shown and not shown.endswith(".") and bool(re.search(r" \(default: [^()]+\)$", shown)) >= bool(has_default)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_argument_has_help(command):
    actions = [each for each in parser_of(command)._actions if each.dest != "help"]
    assert actions and [each.dest for each in actions if not says_what_it_is(each)] == []


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
