"""Blocks of README.md and of docs/ as a reader pastes them: commands, and Python with no more before it than the first
block of the page."""

import importlib
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_hybrid_ssm.models.families import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "checkpoints/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
# a lesson goes on from block to block, and says so
LESSONS = ("docs/teaching/", "docs/families/", "docs/extending.md")
SCRIPTS = ("docs/first_card.md",)  # for the bash of a machine that is lent, in order


def blocks_of(page, language):
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(code) for _, kind, code in found if kind == language]


def name_of(page):
    return page.relative_to(ROOT).as_posix()


SHELL_BLOCKS = [
    pytest.param(block, id=f"{name_of(page)}-{number}")
    for page in PAGES
    if name_of(page) not in SCRIPTS
    for number, block in enumerate(blocks_of(page, "bash"))
]


def lines_of(block):
    """The commands of a block, and before them the variables that it sets."""
    lines = block.replace("\\\n", " ").splitlines()
    variables = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]+=\S*$", line))
    return variables, [line for line in lines if line.strip() and not re.match(r"[A-Z]+=\S*$", line)]


def expected_words(block):
    """What programs are to get, by Python's own reading of a shell's words."""
    variables, lines = lines_of(block)
    found = []
    for line in lines:
        words = shlex.split(re.sub(r" > \S+$", "", line))
        words = [re.sub(r"\$([A-Z]+)", lambda name: variables[name[1]], word) for word in words]
        if words[0] != "cd":  # which is the shell's own
            found.append([Path(words[0]).name, *map(os.path.expanduser, words[1:])])
    return found


@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_every_command_accepts_its_arguments(block):
    """By the parser of the command, without running it; no comment and no bare bracket, which zsh reads otherwise."""
    assert not re.search(r"(^|\s)#", re.sub(r"'[^']*'|\"[^\"]*\"", "", block))
    assert "[" not in re.sub(r"'[^']*'|\"[^\"]*\"", "", block)
    from hf_hybrid_ssm.cli import COMMANDS
    from hf_hybrid_ssm.cli.recipe import check_settings

    for program, *words in expected_words(block):
        if program == "python" and not words[0].startswith("-"):
            assert (ROOT / words[0]).is_file(), words
        if program == "python" and words[0].startswith("recipes/"):
            name, words = Path(words[0]).stem, words[1:]
            check_settings(name, [word for word in words if word != "..."])
        elif program == "hf-hybrid-ssm":
            command, *rest = words
            assert command in COMMANDS
            if command == "recipe":
                check_settings(rest[0], rest[1:])
            elif command not in ("run", "eval"):  # what these start reads the rest
                importlib.import_module(f"hf_hybrid_ssm.cli.{command}").build_parser().parse_args(rest)


PYTHON_BLOCKS = [
    pytest.param(page, number, id=f"{name_of(page)}-{number}")
    for page in PAGES
    if not name_of(page).startswith((*LESSONS, "README"))
    for number in range(1, len(blocks_of(page, "python")))
]


@pytest.fixture
def run_blocks(tmp_path, monkeypatch):
    """Run blocks of Python one after the other, in a folder that has a clone's checkpoints."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, "documentation", module)
    families = [*FAMILIES]

    def run(*blocks):
        for block in blocks:
            block = block if torch.cuda.is_available() else block.replace('device="cuda"', 'device="cpu"')
            exec(compile(block, "documentation", "exec"), vars(module))

    yield run
    FAMILIES[:] = families


@pytest.mark.parametrize(("page", "number"), PYTHON_BLOCKS)
def test_a_block_needs_the_first_of_its_page_at_the_most(page, number, run_blocks):
    """Of the first page a block needs none (tests/test_documentation.py, which runs all of a page in order too)."""
    blocks = blocks_of(page, "python")
    if "from trl import" in blocks[number]:
        pytest.importorskip("trl")
    run_blocks(blocks[0], blocks[number])
