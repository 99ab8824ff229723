"""Blocks of README.md and of docs/ as a reader pastes them: in bash and in zsh, and Python with no more before it than
the first block of the page."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
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
CONTINUES = "Blocks of code continue those before"
SHELLS = {"bash": ["--norc", "-i"], "zsh": ["-f", "-i"]}
STUB = """#!/bin/sh
for word in "${0##*/}" "$@"; do printf '%s\\0' "$word"; done >> "$CALLS"
printf '\\n' >> "$CALLS"
"""


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


def pasted(shell, block, folder):
    """What an interactive shell hands to the programs of a block: each is replaced by one that writes that down."""
    programs = folder / "programs"
    calls = folder / "calls"
    for line in lines_of(block)[1]:
        name = shlex.split(line)[0]
        program = (folder if "/" in name else programs) / name  # found by its path, or by its name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(STUB)
        program.chmod(0o755)
    (folder / ".local/share/bash-completion/completions").mkdir(parents=True)
    environment = {
        "PATH": str(programs),
        "HOME": str(folder),
        "CALLS": str(calls),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }
    command = [shutil.which(shell), *SHELLS[shell]]
    block += "\nexit\n"
    subprocess.run(command, input=block, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    lines = calls.read_text(encoding="utf-8").splitlines() if calls.is_file() else []
    return [line.split("\0")[:-1] for line in lines]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_a_shell_hands_on_what_is_meant(block, shell, tmp_path, monkeypatch):
    """The same words in bash and in zsh, which takes no comments where one types, and brackets as patterns."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pasted(shell, block, tmp_path) == expected_words(block)


@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_every_command_accepts_its_arguments(block):
    """By the parser of the command, without running it."""
    from hf_hybrid_ssm.cli import COMMANDS
    from hf_hybrid_ssm.cli.recipe import check_settings

    for program, *words in expected_words(block):
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_says_what_its_blocks_need(page):
    """Where more than one block is Python: that they follow each other, or that the first is what they need."""
    text, count = page.read_text(encoding="utf-8"), len(blocks_of(page, "python"))
    opening = text[: text.find("```python")]
    if name_of(page).startswith(LESSONS) and count > 1:
        assert CONTINUES in re.sub(r"\s+", " ", opening)
    elif count > 1 and page != ROOT / "README.md":
        assert "first block of code" in re.sub(r"\s+", " ", opening)
