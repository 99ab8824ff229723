"""What a shell offers after `hf-hybrid-ssm completion`, asked in bash; shtab writes the scripts of the others."""

import contextlib
import importlib.metadata
import io
import shutil
import subprocess
import sys

import pytest

from hf_hybrid_ssm.cli import COMMANDS, completion, main

shtab = pytest.importorskip("shtab")

CASES = {
    "upc": {"upcycle"},
    "reci": {"recipe", "recipes"},
    "generate --max": {"--max-new-tokens"},
    "recipe pretrain_": {"pretrain_clm", "pretrain_mlm", "pretrain_seq2seq"},
    "recipe pretrain_clm longhorn/books": {"longhorn/books_cpu"},
    "plan --sharding f": {"fsdp2"},
    "completion z": {"zsh"},
    "check fol": {"folder/"},
}

BASH = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMP_LINE="${{COMP_WORDS[*]}}"
_shtab_hf_hybrid_ssm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The completion, in a folder with another one whose name begins with `fol`."""
    folder, printed = tmp_path_factory.mktemp("completion"), io.StringIO()
    (folder / "folder").mkdir()
    with contextlib.redirect_stdout(printed):
        assert main(["completion", "bash"]) == 0
    (folder / "script").write_text(printed.getvalue(), encoding="utf-8")
    return folder / "script"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("words", CASES)
def test_bash(script, words):
    code = BASH.format(script=script, words=f"hf-hybrid-ssm {words}")
    shown = subprocess.run(["bash", "-c", code], cwd=script.parent, capture_output=True, text=True, check=True).stdout
    assert {word.removesuffix("/") for word in shown.split()} == {word.removesuffix("/") for word in CASES[words]}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_command_and_option_is_offered(shell, capsys):
    assert main(["completion", shell]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command in shown
    for option in ("--max-new-tokens", "--sharding", "--keep-by"):
        assert option.removeprefix("--") in shown


def test_without_shtab_it_says_what_to_type(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["shtab>=1; extra == 'completion'"])
    assert main(["completion", "bash"]) == 1
    assert "shtab is needed: pip install 'shtab" in capsys.readouterr().err
